#include "llama_target.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"
#include "llama_ext.h"

namespace pyfly {

namespace {

// Tokens that only have a meaning to the chat format: control, unknown and unused ones, and user-defined markers such
// as <think> or <tool_call>, which are normal text to the model but appear in its chat template. A model without a
// vocabulary has only the numbers of its tokens; llama.cpp ends the process when asked for more.
void protect_vocabulary(Target & target, const llama_model * model) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        return;
    }
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

bool is_recurrent(const llama_model * model) {
    return llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
}

std::string model_architecture(const llama_model * model) {
    char name[128] = "";
    llama_model_meta_val_str(model, "general.architecture", name, sizeof(name));
    return name;
}

LlamaTarget::LlamaTarget(llama_context * context, bool is_adaptive, bool is_batch_adaptive)
    : Target(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)))), context_(context),
      thread_pool_(std::make_unique<ThreadPool>(
          ThreadPool::Size{llama_n_threads(context), llama_n_threads_batch(context), is_adaptive, is_batch_adaptive})) {
    const llama_model * model = llama_get_model(context);
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_ctx_ = static_cast<int32_t>(llama_n_ctx_seq(context));
    n_batch_ = static_cast<int32_t>(llama_n_batch(context));
    n_swa_ = llama_model_n_swa(model);
    if (is_recurrent(model)) {
        rollback_.emplace(static_cast<int32_t>(llama_n_rs_seq(context)));
    }
    if (n_vocab_ < 1 || llama_get_memory(context) == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "this model cannot generate text: it has no vocabulary or no memory");
    }
    protect_vocabulary(*this, model);
    thread_pool_->attach(context);
}

namespace {

// A batch of sequence 0 whose arrays are kept between calls: llama_batch_init would allocate and free them every time.
// Valid until the next call on this thread.
llama_batch make_batch(size_t n, int32_t n_past, size_t first_row) {
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
    batch.pos = positions.data();
    batch.n_seq_id = n_seq_ids.data();
    batch.seq_id = seq_ids.data();
    batch.logits = outputs.data();
    return batch;
}

} // namespace

namespace {

// Runs llama_decode or llama_encode on a batch, waits for the result and returns its code.
int32_t compute(llama_context * context, ThreadPool * threads, const llama_batch & batch,
                int32_t (*function)(llama_context *, llama_batch)) {
    int32_t code = 0;
    const auto evaluate = [&] {
        code = function(context, batch);
        llama_synchronize(context);
    };
    if (threads != nullptr) {
        threads->run(context, batch.n_tokens, evaluate);
    } else {
        evaluate();
    }
    return code;
}

} // namespace

void decode_tokens(llama_context * context, ThreadPool * threads, const char * who, const int32_t * tokens, size_t n,
                   int32_t n_past, size_t first_row, const float * inputs) {
    llama_batch batch = make_batch(n, n_past, first_row);
    batch.token = const_cast<llama_token *>(tokens); // llama_decode does not write to it
    batch.embd = const_cast<float *>(inputs);
    const int32_t code = compute(context, threads, batch, llama_decode);
    if (code != 0) {
        // A recurrent state is of no use after half a batch, and cutting it may succeed and be wrong.
        llama_memory_seq_rm(llama_get_memory(context), 0, is_recurrent(llama_get_model(context)) ? -1 : n_past, -1);
        const char * why = code == 1    ? "no room in its KV cache for this batch; raise n_ctx"
                           : code == 2  ? "the decode was aborted"
                           : code == -1 ? "the batch was refused"
                                        : "the backend failed";
        throw Error(code == 1 ? PYFLY_STATUS_CONTEXT_FULL : PYFLY_STATUS_NATIVE,
                    std::string("llama_decode on the ") + who + " returned " + std::to_string(code) + ": " + why);
    }
}

void encode_rows(llama_context * context, ThreadPool * threads, const char * who, const float * rows, size_t n) {
    // The encoder does not use the positions, but llama.cpp wants them to continue from its memory.
    llama_batch batch = make_batch(n, llama_memory_seq_pos_max(llama_get_memory(context), 0) + 1, 0);
    batch.embd = const_cast<float *>(rows);
    const int32_t code = compute(context, threads, batch, llama_encode);
    if (code != 0) {
        throw Error(PYFLY_STATUS_NATIVE,
                    std::string("llama_encode on the ") + who + " returned " + std::to_string(code));
    }
}

void LlamaTarget::evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) {
    act();
    if (rollback_) {
        rollback_->forget_batch(); // should this throw
    }
    decode_tokens(context_, thread_pool_.get(), "target", tokens, n, n_past, first_row);
    if (rollback_) {
        rollback_->evaluated(n);
    }
}

const float * LlamaTarget::row(size_t i) {
    const float * row = llama_get_logits_ith(context_, static_cast<int32_t>(i));
    if (row == nullptr) {
        throw Error(PYFLY_STATUS_INTERNAL, "llama.cpp kept no logits for batch index " + std::to_string(i));
    }
    return row;
}

int32_t LlamaTarget::n_held() const {
    return llama_memory_seq_pos_max(llama_get_memory(context_), 0) + 1;
}

// Positions from 0 on that the cache of the sliding window has dropped (swa_full=False): 0 while it has room.
int32_t LlamaTarget::n_pruned() const {
    return std::max(0, static_cast<int32_t>(llama_memory_seq_pos_min(llama_get_memory(context_), 0)));
}

// Whether a layer with a sliding window looks, at position n, at one of the first n_pruned positions.
bool LlamaTarget::needs(int32_t n, int32_t n_pruned) const {
    return n_swa_ > 0 && n_pruned > std::max(0, n - n_swa_ + 1);
}

// The cache drops the oldest cells it does not need, and only when it is full; it has room for the window and a batch.
bool LlamaTarget::can_return(int32_t n, int32_t n_more) const {
    if (rollback_) {
        return has_checkpoints_;
    }
    const int32_t n_now = n_pruned();
    const bool is_full = n_now > 0 || n_held() + n_more > n_swa_ + static_cast<int32_t>(llama_n_ubatch(context_));
    return !needs(n, is_full ? n_now + n_more : 0);
}

int32_t LlamaTarget::truncate(int32_t n) {
    if (rollback_) {
        return rollback_->truncate(n_held(), n);
    }
    if (needs(std::min(n, n_held()), n_pruned())) {
        // llama.cpp would cut its cache all the same (as it does when a batch fails) and go on with what is missing.
        llama_memory_seq_rm(llama_get_memory(context_), 0, -1, -1);
        return 0;
    }
    if (n >= n_held()) {
        return n_held();
    }
    if (!llama_memory_seq_rm(llama_get_memory(context_), 0, n, -1)) {
        throw Error(PYFLY_STATUS_NATIVE,
                    "the target's memory could not be rolled back to position " + std::to_string(n));
    }
    return n;
}

// Carries out what truncate() planned.
void LlamaTarget::act() {
    if (!rollback_) {
        return;
    }
    const llama_memory_t memory = llama_get_memory(context_);
    const Rollback::Plan plan = rollback_->take();
    bool is_done = true;
    switch (plan.way) {
        case Rollback::Way::stay:
            break;
        case Rollback::Way::snapshot:
            is_done = llama_memory_seq_rm(memory, 0, plan.n, -1);
            break;
        case Rollback::Way::checkpoint:
            // The recurrent part is replaced; what the attention part of a hybrid memory holds behind it is cut off.
            is_done = llama_state_seq_set_data_ext(context_, checkpoint_.data(), checkpoint_.size(), 0,
                                                   LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == checkpoint_.size() &&
                      llama_memory_seq_rm(memory, 0, plan.n, -1);
            break;
        case Rollback::Way::clear:
            llama_memory_seq_rm(memory, 0, -1, -1); // removing a whole sequence works for every kind of memory
            break;
    }
    if (!is_done) {
        llama_memory_seq_rm(memory, 0, -1, -1);
        throw Error(PYFLY_STATUS_NATIVE, "the target's recurrent state could not be rolled back to position " +
                                             std::to_string(plan.n) + "; decode without a drafter");
    }
}

void LlamaTarget::keep_nextn(bool is_kept) {
    n_nextn_users_ += is_kept ? 1 : -1;
    llama_set_embeddings_nextn(context_, n_nextn_users_ > 0, /*masked=*/false);
}

void LlamaTarget::keep_layer_input(uint32_t layer, bool is_kept) {
    n_layer_users_[layer] += is_kept ? 1 : -1;
    llama_set_embeddings_layer_inp(context_, layer, n_layer_users_[layer] > 0);
}

bool LlamaTarget::checkpoint() {
    if (!rollback_ || rollback_->will_restore_checkpoint()) {
        return true;
    }
    if (!has_checkpoints_) {
        return false;
    }
    act();
    rollback_->forget_checkpoint();
    checkpoint_.resize(llama_state_seq_get_size_ext(context_, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
    const size_t n_written = llama_state_seq_get_data_ext(context_, checkpoint_.data(), checkpoint_.size(), 0,
                                                          LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    has_checkpoints_ = n_written > 0 && n_written == checkpoint_.size();
    if (has_checkpoints_) {
        rollback_->checkpointed(n_held());
    }
    return has_checkpoints_;
}

void LlamaTarget::forget_checkpoint() {
    if (rollback_) {
        rollback_->forget_checkpoint();
    }
}

void LlamaTarget::settle() {
    act();
    if (rollback_) {
        rollback_->forget_batch();
    }
}

} // namespace pyfly
