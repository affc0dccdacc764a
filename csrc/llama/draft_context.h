// What every drafter with a model of its own needs: the model, its context, and that it fits the target.
#pragma once

#include <functional>
#include <memory>

#include "llama.h"
#include "llama_target.h"
#include "model_file.h"
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

// A hash of all that open_sharing_vocabulary() compares.
uint64_t vocabulary_hash(const llama_vocab * vocabulary);

// Throws Error(PYFLY_STATUS_INVALID) unless p_min is in [0, 1].
double require_p_min(double p_min);

// A model of its own, a head that may use tensors of the target and so must be where they are, or an MTP head, that is,
// the file's MTP blocks.
enum class DraftKind { model, head, mtp_head };

// Opens a file; `what` names it in errors. Throws Error(NATIVE) if llama.cpp cannot.
using OpenDraft = std::function<ModelPointer(const ModelFile & file, const char * what, DraftKind kind)>;

// To draft with: loads the weights as `config` says, beside the target. Both are borrowed.
OpenDraft open_with_weights(const LlamaTarget & target, const pyfly_draft_model_config & config);

// To see whether it fits: neither reads weights nor allocates memory for them.
ModelPointer open_without_weights(const ModelFile & file, const char * what, DraftKind kind);

// Opens a file whose vocabulary is the target's; throws Error(INCOMPATIBLE), with the first difference and the remedy,
// where it is not; for other tokens before it is opened. One of the two may have up to n_spare tokens more at its end.
// BOS and EOS count where a model puts them into its texts by itself.
ModelPointer open_sharing_vocabulary(const llama_model * target, const ModelFile & file, const OpenDraft & open,
                                     const char * what, DraftKind kind, int32_t n_spare = 0,
                                     const char * remedy = "use one of the same model family");

// Parameters of a context that runs beside the target's and follows as many requests. They share its cells, so that
// their batches are evaluated in one go whatever their lengths: as many as the target has, or config.n_ctx for each
// request. Throws Error(PYFLY_STATUS_INVALID) for a V cache that needs flash attention where it is off.
llama_context_params draft_context_params(const LlamaTarget & target, const pyfly_draft_model_config & config);

// The pool whose size the draft's context follows; null where the configuration gives it a thread count.
ThreadPool * followed_pool(const LlamaTarget & target, const pyfly_draft_model_config & config);

// Creates the context, on the target's threads. Throws Error(PYFLY_STATUS_NATIVE) if llama.cpp cannot.
ContextPointer make_draft_context(const LlamaTarget & target, llama_model * model, const llama_context_params & params,
                                  const char * what);

} // namespace pyfly
