#include "sequence_trial.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "abort_guard.h"
#include "draft_context.h"
#include "llama_model.h"

namespace pyfly {

namespace {

// Of two sequences with several tokens each, these graphs keep wrong states: they store the shift of the last tokens as
// if those were neighbours in memory. Single tokens are.
bool mixes_sequences(const std::string & architecture) {
    return architecture == "arwkv7" || architecture == "rwkv6qwen2";
}

struct Tokens {
    llama_seq_id sequence;
    llama_pos begin, end;
};

void decode(llama_context * context, std::initializer_list<Tokens> parts) {
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<llama_seq_id> ids;
    for (const Tokens & part : parts) {
        for (llama_pos i = part.begin; i < part.end; i++) {
            tokens.push_back(0);
            positions.push_back(i);
            ids.push_back(part.sequence);
        }
    }
    std::vector<int32_t> n_seq_ids(tokens.size(), 1);
    std::vector<llama_seq_id *> seq_ids;
    std::transform(ids.begin(), ids.end(), std::back_inserter(seq_ids), [](llama_seq_id & id) { return &id; });
    llama_batch batch = {};
    batch.n_tokens = static_cast<int32_t>(tokens.size());
    batch.token = tokens.data();
    batch.pos = positions.data();
    batch.n_seq_id = n_seq_ids.data();
    batch.seq_id = seq_ids.data();
    llama_decode(context, batch);
}

// The second and third sequence of three, so that states neither begin nor end where the memory does.
bool can_build(llama_context * context) {
    try {
        decode(context, {{0, 0, 2}});
        decode(context, {{1, 0, 2}, {2, 0, 2}});
        decode(context, {{1, 2, 3}, {2, 2, 3}});
    } catch (const std::runtime_error &) {
        return false;
    }
    return true;
}

} // namespace

Together find_together(llama_context * context) {
    const uint32_t n_snapshots = llama_n_rs_seq(context);
    auto * model = const_cast<llama_model *>(llama_get_model(context)); // which a new context does not change
    if (llama_n_seq_max(context) > 1) {
        llama_context_params params = llama_context_default_params();
        params.n_seq_max = 3;
        params.kv_unified = true;
        params.n_ctx = 256;
        params.n_batch = params.n_ubatch = n_snapshots + 8;
        params.n_rs_seq = n_snapshots;
        params.n_threads = params.n_threads_batch = llama_n_threads(context);
        const AbortGuard guard;
        const ContextPointer trial(llama_init_from_model(model, params));
        if (trial && !can_build(trial.get())) {
            return Together::none;
        }
    }
    return mixes_sequences(model_architecture(model)) ? Together::singles : Together::all;
}

} // namespace pyfly
