// Prototypes of the functions of llama.cpp's staging header (src/llama-ext.h, not installed with llama.h) that the
// heads, and what measures a context, need. libllama exports them with C++ names, so a declaration is all
// it takes to link. Of those that llama.h declares, too, it has the C name, which the declaration here inherits.
// CMakeLists.txt finds out which of them this release has; in place of the others stands what does nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "llama.h"

namespace pyfly {
constexpr bool has_nextn = PYFLY_HAS_NEXTN, has_layer_inputs = PYFLY_HAS_LAYER_INPUTS;
}

#if PYFLY_HAS_NEXTN
// Whether the context keeps the hidden states that NextN heads read: of every token of a batch, or (masked) of those
// with logits only.
LLAMA_API void llama_set_embeddings_nextn(struct llama_context * ctx, bool value, bool masked);

// The kept states of the last batch, [n][llama_model_n_embd_out]; valid until the next batch.
LLAMA_API float * llama_get_embeddings_nextn(struct llama_context * ctx);
LLAMA_API float * llama_get_embeddings_nextn_ith(struct llama_context * ctx, int32_t i);

// Which NextN block an MTP context runs, 0 for the first.
LLAMA_API void llama_set_nextn_layer_offset(struct llama_context * ctx, int32_t offset);
#else
inline void llama_set_embeddings_nextn(llama_context *, bool, bool) {}
inline float * llama_get_embeddings_nextn(llama_context *) {
    return nullptr;
}
inline float * llama_get_embeddings_nextn_ith(llama_context *, int32_t) {
    return nullptr;
}
inline void llama_set_nextn_layer_offset(llama_context *, int32_t) {}
#endif

#if PYFLY_HAS_LAYER_INPUTS

// Whether the context keeps the inputs of layer `lid`, and those of the last batch, [n][llama_model_n_embd]. Reading a
// layer that is not kept, or keeping one that the model does not publish, aborts the process.
LLAMA_API void llama_set_embeddings_layer_inp(struct llama_context * ctx, uint32_t lid, bool value);
LLAMA_API float * llama_get_embeddings_layer_inp(struct llama_context * ctx, uint32_t lid);

// The target layers whose inputs an EAGLE-3 head reads.
LLAMA_API const int32_t * llama_model_target_layer_ids(const struct llama_model * model);
LLAMA_API uint32_t llama_model_target_layer_ids_n(const struct llama_model * model);
#else
inline void llama_set_embeddings_layer_inp(llama_context *, uint32_t, bool) {}
inline float * llama_get_embeddings_layer_inp(llama_context *, uint32_t) {
    return nullptr;
}
inline const int32_t * llama_model_target_layer_ids(const llama_model *) {
    return nullptr;
}
inline uint32_t llama_model_target_layer_ids_n(const llama_model *) {
    return 0;
}
#endif

#if PYFLY_HAS_MEMORY_BREAKDOWN
// Bytes that a context and its model hold, by type of buffer; simulated where the model was loaded with no_alloc.
struct llama_memory_breakdown_data {
    size_t model = 0;
    size_t context = 0;
    size_t compute = 0;
};
LLAMA_API std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>
llama_get_memory_breakdown(const struct llama_context * ctx);
#endif

#if PYFLY_HAS_MODEL_DEVICES
// The devices that a model is on, in the order of tensor_split.
LLAMA_API int32_t llama_model_n_devices(const struct llama_model * model);
LLAMA_API ggml_backend_dev_t llama_model_get_device(const struct llama_model * model, int i);
#else
inline int32_t llama_model_n_devices(const llama_model *) {
    return 0;
}
inline ggml_backend_dev_t llama_model_get_device(const llama_model *, int) {
    return nullptr;
}
#endif

#if PYFLY_HAS_GRAPH
// The graph of a batch; valid until the next call or batch. What the context holds stays.
LLAMA_API struct ggml_cgraph * llama_graph_reserve(struct llama_context * ctx, uint32_t n_tokens, uint32_t n_seqs,
                                                   uint32_t n_outputs);
#else
inline ggml_cgraph * llama_graph_reserve(llama_context *, uint32_t, uint32_t, uint32_t) {
    return nullptr;
}
#endif
