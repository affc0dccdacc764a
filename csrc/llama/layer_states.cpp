#include "layer_states.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "error.h"
#include "layer_rows.h"
#include "rows.h"

namespace pyfly {

namespace {

constexpr size_t n_chunk = 256; // tokens at a time: their logits take memory
constexpr float half_max = 65504.0f;

// While it lives, llama.cpp keeps the states that the output matrix reads.
class FinalStates {
  public:
    explicit FinalStates(llama_context * context) : context_(context) { llama_set_embeddings(context_, true); }
    ~FinalStates() { llama_set_embeddings(context_, false); }
    FinalStates(const FinalStates &) = delete;
    FinalStates & operator=(const FinalStates &) = delete;

    // Of the last batch's token i.
    const float * row(size_t i) const {
        const float * row = llama_get_embeddings_ith(context_, static_cast<int32_t>(i));
        if (row == nullptr) {
            throw Error(PYFLY_STATUS_NATIVE, "llama.cpp kept no final state of a token");
        }
        return row;
    }

  private:
    llama_context * context_;
};

// The target's first sequence is empty at the beginning and at the end of its life.
class Emptied {
  public:
    explicit Emptied(LlamaTarget & target) : target_(target) { empty(); }
    ~Emptied() {
        try {
            empty();
        } catch (const std::exception &) { // who uses it next is told
        }
    }
    Emptied(const Emptied &) = delete;
    Emptied & operator=(const Emptied &) = delete;

  private:
    void empty() {
        target_.truncate(0, 0);
        target_.settle(0);
    }

    LlamaTarget & target_;
};

// Appends to half floats; a NaN has no place there.
void append_halves(std::vector<float> & values, uint16_t *& to) {
    for (float & value : values) {
        if (std::isnan(value)) {
            throw Error(PYFLY_STATUS_NOT_FINITE,
                        "a hidden state of the target is not a number; download or convert the model again");
        }
        value = std::clamp(value, -half_max, half_max);
    }
    ggml_fp32_to_fp16_row(values.data(), to, static_cast<int64_t>(values.size()));
    to += values.size();
}

} // namespace

void read_states(LlamaTarget & target, const std::vector<int32_t> & layers, const std::vector<int32_t> & tokens,
                 int32_t k, const LayerStates & out) {
    const size_t n_vocab = static_cast<size_t>(target.n_vocab()), n = tokens.size(), width_k = static_cast<size_t>(k);
    if (n < 1 || n > static_cast<size_t>(target.n_ctx()) || k < 1 || k > max_top || width_k > n_vocab ||
        std::any_of(tokens.begin(), tokens.end(), [&](int32_t t) { return t < 0 || t >= target.n_vocab(); })) {
        throw Error(PYFLY_STATUS_INVALID, "states need 1 to " + std::to_string(target.n_ctx()) +
                                              " tokens of the vocabulary and 1 to " + std::to_string(max_top) +
                                              " most probable ones");
    }
    const LayerRows rows(target, layers);
    const FinalStates final(target.context());
    const Emptied emptied(target);
    const size_t n_embd = static_cast<size_t>(llama_model_n_embd(llama_get_model(target.context())));
    LayerStates to = out;
    std::vector<float> states;
    for (size_t begin = 0, n_now; begin < n; begin += n_now) {
        n_now = std::min({n - begin, n_chunk, static_cast<size_t>(target.n_batch())});
        target.evaluate({{0, tokens.data() + begin, n_now, begin, 0}});
        states.resize(n_now * rows.width());
        rows.read(0, 0, n_now, states.data());
        append_halves(states, to.states);
        for (size_t i = 0; i < n_now; i++) {
            states.assign(final.row(i), final.row(i) + n_embd);
            append_halves(states, to.final);
            const RowStats row = row_stats(target.row(0, i), n_vocab, k);
            if (!row.max.finite) {
                throw Error(PYFLY_STATUS_NOT_FINITE,
                            "a row of the target has no distribution; download or convert the model again");
            }
            for (size_t j = 0; j < width_k; j++) {
                out.ids[(begin + i) * width_k + j] = row.top[j].token;
                out.log_probs[(begin + i) * width_k + j] = static_cast<float>(row.log_prob(row.top[j].logit));
            }
        }
    }
}

} // namespace pyfly
