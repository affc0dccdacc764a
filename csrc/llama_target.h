// A llama_context as a Target.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llama.h"
#include "rollback.h"
#include "target.h"
#include "thread_pool.h"

namespace pyfly {

class LlamaTarget : public Target {
  public:
    // The context is borrowed and gets a thread pool of its thread counts, until the target goes; is_adaptive and
    // is_batch_adaptive say whether they are only the most threads. Throws Error(PYFLY_STATUS_INVALID) for a context
    // without memory or vocabulary.
    LlamaTarget(llama_context * context, bool is_adaptive, bool is_batch_adaptive);
    ~LlamaTarget() override { llama_detach_threadpool(context_); }

    int32_t n_vocab() const override { return n_vocab_; }
    int32_t n_ctx() const override { return n_ctx_; }
    int32_t n_batch() const override { return n_batch_; }
    void evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) override;
    const float * row(size_t i) override;
    int32_t truncate(int32_t n) override;
    int32_t rewind_depth() const override { return rollback_ ? rollback_->n_snapshots() : unlimited; }
    bool checkpoint() override;
    void forget_checkpoint() override;
    bool can_checkpoint() const override { return has_checkpoints_; }
    bool can_return(int32_t n, int32_t n_more) const override;
    void settle() override;

    llama_context * context() const { return context_; }

    // Switches on (and, as often, off) what heads read after every batch: the hidden states behind the last layer, the
    // inputs of a layer. The model must publish them.
    void keep_nextn(bool is_kept);
    void keep_layer_input(uint32_t layer, bool is_kept);

    // The pool of CPU threads that drafters' contexts share with the target's. The target outlives them.
    ThreadPool & thread_pool() const { return *thread_pool_; }

  private:
    int32_t n_held() const;
    int32_t n_pruned() const;
    bool needs(int32_t n, int32_t n_pruned) const;
    void act();

    llama_context * context_;
    std::unique_ptr<ThreadPool> thread_pool_;
    int32_t n_vocab_, n_ctx_, n_batch_;
    int32_t n_swa_;                    // tokens of a sliding window of attention, 0: none
    std::optional<Rollback> rollback_; // for recurrent and hybrid memory
    bool has_checkpoints_ = true;      // until llama.cpp refuses one
    std::vector<uint8_t> checkpoint_;
    int32_t n_nextn_users_ = 0;
    std::map<uint32_t, int32_t> n_layer_users_;
};

// Whether a model's memory holds a recurrent state, alone or beside a KV cache.
bool is_recurrent(const llama_model * model);

// "general.architecture" of a model.
std::string model_architecture(const llama_model * model);

// Evaluates tokens[n] at positions n_past... of sequence 0, with logits from index first_row on (n: none), and waits
// for the result. Throws Error naming `who` and what llama_decode returned; what was evaluated of it is removed, from a
// recurrent memory everything. `inputs`: for heads, the row that goes with each token; else null. `threads`: whose size
// the context follows; null: it has its own thread count.
void decode_tokens(llama_context * context, ThreadPool * threads, const char * who, const int32_t * tokens, size_t n,
                   int32_t n_past, size_t first_row, const float * inputs = nullptr);

// Runs a context's encoder over rows [n][its input width], n <= n_ubatch, and waits for it. Otherwise likewise.
void encode_rows(llama_context * context, ThreadPool * threads, const char * who, const float * rows, size_t n);

} // namespace pyfly
