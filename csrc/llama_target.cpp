#include "llama_target.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"

namespace pyfly {

namespace {

// Tokens that only have a meaning to the chat format: control, unknown and unused ones, and user-defined markers such
// as <think> or <tool_call>, which are normal text to the model but appear in its chat template.
void protect_vocabulary(Target & target, const llama_model * model) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const char * chat_template = llama_model_chat_template(model, nullptr);
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    for (int32_t token = 0; token < n_vocab; token++) {
        const int attributes = llama_vocab_get_attr(vocab, token);
        if (llama_vocab_is_eog(vocab, token)) {
            target.mark_eog(token);
        } else if (attributes & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN | LLAMA_TOKEN_ATTR_UNUSED)) {
            target.protect(token);
        } else if (attributes & LLAMA_TOKEN_ATTR_USER_DEFINED) {
            const char * text = llama_vocab_get_text(vocab, token);
            const size_t length = std::strlen(text);
            const bool is_marker = length > 2 && text[0] == '<' && text[length - 1] == '>';
            if (is_marker || (chat_template && length > 2 && std::strstr(chat_template, text))) {
                target.protect(token);
            }
        }
    }
}

} // namespace

LlamaTarget::LlamaTarget(llama_context * context)
    : Target(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)))), context_(context),
      thread_pool_(std::max(llama_n_threads(context), llama_n_threads_batch(context))) {
    const llama_model * model = llama_get_model(context);
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_ctx_ = static_cast<int32_t>(llama_n_ctx_seq(context));
    n_batch_ = static_cast<int32_t>(llama_n_batch(context));
    can_rewind_ = !llama_model_is_recurrent(model) && !llama_model_is_hybrid(model);
    if (n_vocab_ < 1 || llama_get_memory(context) == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "this model cannot generate text: it has no vocabulary or no memory");
    }
    protect_vocabulary(*this, model);
    thread_pool_.attach(context);
}

void decode_tokens(llama_context * context, const char * who, const int32_t * tokens, size_t n, int32_t n_past,
                   size_t first_row) {
    // The batch's arrays are ours: llama_batch_init would allocate and free them for every call.
    thread_local std::vector<llama_pos> positions;
    thread_local std::vector<int32_t> n_seq_ids;
    thread_local std::vector<llama_seq_id *> seq_ids;
    thread_local std::vector<int8_t> outputs;
    thread_local llama_seq_id sequence = 0;
    positions.resize(n);
    n_seq_ids.assign(n, 1);
    seq_ids.assign(n, &sequence);
    outputs.resize(n);
    for (size_t i = 0; i < n; i++) {
        positions[i] = n_past + static_cast<int32_t>(i);
        outputs[i] = i >= first_row ? 1 : 0;
    }
    llama_batch batch = {};
    batch.n_tokens = static_cast<int32_t>(n);
    batch.token = const_cast<llama_token *>(tokens); // llama_decode does not write to it
    batch.pos = positions.data();
    batch.n_seq_id = n_seq_ids.data();
    batch.seq_id = seq_ids.data();
    batch.logits = outputs.data();
    const int32_t code = llama_decode(context, batch);
    if (code != 0) {
        llama_memory_seq_rm(llama_get_memory(context), 0, n_past, -1);
        const char * why = code == 1    ? "no room in its KV cache for this batch; raise n_ctx"
                           : code == 2  ? "the decode was aborted"
                           : code == -1 ? "the batch was refused"
                                        : "the backend failed";
        throw Error(code == 1 ? PYFLY_STATUS_CONTEXT_FULL : PYFLY_STATUS_NATIVE,
                    std::string("llama_decode on the ") + who + " returned " + std::to_string(code) + ": " + why);
    }
    llama_synchronize(context);
}

void LlamaTarget::evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) {
    decode_tokens(context_, "target", tokens, n, n_past, first_row);
}

const float * LlamaTarget::row(size_t i) {
    const float * row = llama_get_logits_ith(context_, static_cast<int32_t>(i));
    if (row == nullptr) {
        throw Error(PYFLY_STATUS_INTERNAL, "llama.cpp kept no logits for batch index " + std::to_string(i));
    }
    return row;
}

void LlamaTarget::truncate(int32_t n) {
    const llama_memory_t memory = llama_get_memory(context_);
    // From position -1 on: removing a whole sequence works for every kind of memory.
    if (llama_memory_seq_pos_max(memory, 0) >= n && !llama_memory_seq_rm(memory, 0, n > 0 ? n : -1, -1)) {
        throw Error(PYFLY_STATUS_NATIVE,
                    "the target's memory could not be rolled back to position " + std::to_string(n));
    }
}

} // namespace pyfly
