// A llama_context as a Target.
#pragma once

#include <vector>

#include "llama.h"
#include "target.h"
#include "thread_pool.h"

namespace pyfly {

class LlamaTarget : public Target {
  public:
    // The context is borrowed and gets a thread pool of its thread count, until the target goes. Throws
    // Error(PYFLY_STATUS_INVALID) for one without memory or vocabulary.
    explicit LlamaTarget(llama_context * context);
    ~LlamaTarget() override { llama_detach_threadpool(context_); }

    int32_t n_vocab() const override { return n_vocab_; }
    int32_t n_ctx() const override { return n_ctx_; }
    int32_t n_batch() const override { return n_batch_; }
    void evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) override;
    const float * row(size_t i) override;
    void truncate(int32_t n) override;
    bool can_rewind() const override { return can_rewind_; }

    llama_context * context() const { return context_; }

    // The pool of CPU threads that drafters' contexts share with the target's. The target outlives them.
    const ThreadPool & thread_pool() const { return thread_pool_; }

  private:
    llama_context * context_;
    ThreadPool thread_pool_;
    int32_t n_vocab_, n_ctx_, n_batch_;
    bool can_rewind_;
};

// Evaluates tokens[n] at positions n_past... of sequence 0, with logits from index first_row on (n: none), and waits
// for the result. Throws Error naming `who` and what llama_decode returned; what was evaluated of it is removed.
void decode_tokens(llama_context * context, const char * who, const int32_t * tokens, size_t n, int32_t n_past,
                   size_t first_row);

} // namespace pyfly
