// What every drafter with a model of its own needs: the model, its context, and that it fits the target.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "distribution.h"
#include "llama.h"
#include "llama_target.h"
#include "pyfly.h"

namespace pyfly {

struct ModelDeleter {
    void operator()(llama_model * model) const { llama_model_free(model); }
};
struct ContextDeleter {
    void operator()(llama_context * context) const { llama_free(context); }
};
using ModelPointer = std::unique_ptr<llama_model, ModelDeleter>;
using ContextPointer = std::unique_ptr<llama_context, ContextDeleter>;

// Tokens of padding by which the vocabularies of a draft model and its target may differ, as in llama.cpp.
constexpr int32_t most_padding = 128;

// Where the draft's vocabulary differs from the target's, in one sentence; empty if it does not. One of them may have
// up to n_spare tokens more than the other: sizes of one family are padded differently (Qwen2.5-7B has 152,064 tokens
// and its 0.5B 151,936; llama.cpp allows 128). BOS and EOS count where a model puts them into its texts by itself.
std::string vocabulary_difference(const llama_vocab * target, const llama_vocab * draft, int32_t n_spare);

// Throws Error(PYFLY_STATUS_INVALID) unless p_min is in [0, 1].
double require_p_min(double p_min);

// What a logits row [n_vocab] of a drafter proposes: its most probable token, or, with `draw`, what that draws; nothing
// where the most probable one falls under p_min. Throws Error(PYFLY_STATUS_NOT_FINITE), naming `who`, for a row without
// a distribution.
std::optional<int32_t> draft_token(const float * row, size_t n_vocab, double p_min, const char * who,
                                   const DrawDraft & draw, std::vector<Weights> & drawn);

// Loads config.model_path, with its MTP blocks if asked for; `what` names it in errors. Throws Error(NATIVE) if
// llama.cpp cannot.
ModelPointer load_draft(const pyfly_draft_model_config & config, const char * what, bool load_mtp);

// Throws Error(INCOMPATIBLE), with the remedy, if the vocabularies differ by more than n_spare tokens at the end.
void require_vocabulary(const LlamaTarget & target, const llama_model * model, const pyfly_draft_model_config & config,
                        const char * what, const char * remedy = "use one of the same model family",
                        int32_t n_spare = 0);

// Parameters of a context that runs beside the target's and follows as many texts. They share its cells, so that their
// batches are evaluated in one go whatever their lengths: as many as the target has, or config.n_ctx for each text.
// Throws Error(PYFLY_STATUS_INVALID) for a V cache that needs flash attention where it is off.
llama_context_params draft_context_params(const LlamaTarget & target, const pyfly_draft_model_config & config);

// The pool whose size the draft's context follows; null where the configuration gives it a thread count.
ThreadPool * followed_pool(const LlamaTarget & target, const pyfly_draft_model_config & config);

// Creates the context, on the target's threads. Throws Error(PYFLY_STATUS_NATIVE) if llama.cpp cannot.
ContextPointer make_draft_context(const LlamaTarget & target, llama_model * model, const llama_context_params & params,
                                  const char * what);

} // namespace pyfly
