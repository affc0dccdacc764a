// A request's own llama.cpp sampler chain as a Sampler.
#pragma once

#include <memory>
#include <vector>

#include "llama.h"
#include "sampler.h"

namespace pyfly {

struct LlamaSamplerDeleter {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};
using LlamaSamplerPtr = std::unique_ptr<llama_sampler, LlamaSamplerDeleter>;

// The name of the sampler of mask_sampler.h.
inline constexpr const char * mask_name = "mask";

// How many samplers of a chain stand before the first one that truncates, scales or selects.
int32_t count_shaping(const llama_sampler * chain);

// The leading samplers of a chain (custom ones, biases, penalties, grammar) shape the row; from the first one that
// truncates, scales or selects on, they choose.
class ChainSampler : public Sampler, private Distributions {
  public:
    // n_shaping: how many leading samplers shape the row; is_greedy: the rest only takes the argmax.
    ChainSampler(LlamaSamplerPtr chain, int32_t n_shaping, bool is_greedy, bool keeps_shaped_row)
        : chain_(std::move(chain)), n_shaping_(n_shaping), is_greedy_(is_greedy), keeps_shaped_row_(keeps_shaped_row) {}

    int32_t choose(const float * row, size_t n_vocab) override;
    const float * shaped_row() override { return shaped_.data(); }
    Distributions * distributions() override { return is_greedy_ ? nullptr : this; }
    bool could_draw(int32_t token) const override;
    void accept(int32_t token) override { llama_sampler_accept(chain_.get(), token); }
    std::unique_ptr<Sampler> clone() const override;

  private:
    Weights of_target(const float * row, size_t n_vocab) override;
    Weights of_draft(const float * row, size_t n_vocab) override;
    uint64_t seed() const override { return llama_sampler_get_seed(chain_.get()); }

    void set_candidates(const float * row, size_t n_vocab);
    void apply(int32_t begin, int32_t end);
    void shape(const float * row, size_t n_vocab);
    Weights weights() const;

    LlamaSamplerPtr chain_;
    int32_t n_shaping_;
    bool is_greedy_;
    bool keeps_shaped_row_;
    std::vector<llama_token_data> data_; // candidates of the last row
    llama_token_data_array candidates_ = {nullptr, 0, -1, false};
    std::vector<float> shaped_;
};

// The argmax under a grammar. Trying a grammar on a whole vocabulary takes longer than many a model's batch, so it is
// asked about the row's own favourite first, and about the others only if that one is forbidden.
class GreedyGrammarSampler : public Sampler {
  public:
    // The chain's sampler number `grammar` is the grammar, the rest does nothing but take the argmax.
    GreedyGrammarSampler(LlamaSamplerPtr chain, int32_t grammar) : chain_(std::move(chain)), grammar_(grammar) {}

    int32_t choose(const float * row, size_t n_vocab) override;
    const float * shaped_row() override;
    bool could_draw(int32_t) const override { return true; }
    void accept(int32_t token) override { llama_sampler_accept(chain_.get(), token); }
    std::unique_ptr<Sampler> clone() const override;

  private:
    LlamaSamplerPtr chain_;
    int32_t grammar_;
    const float * row_ = nullptr;
    size_t n_vocab_ = 0;
    std::vector<float> shaped_; // empty: not worked out for this row
};

} // namespace pyfly
