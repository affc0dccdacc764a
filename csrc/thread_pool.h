// One pool of CPU threads for all contexts of an object.
#pragma once

#include "llama.h"

namespace pyfly {

// A ggml thread pool, attached to contexts that run one after the other. Without it every context makes its own, and
// builds of ggml without OpenMP start and join threads for every batch.
class ThreadPool {
  public:
    // n_threads >= 1. Where the CPU backend offers no pools, the object does nothing.
    explicit ThreadPool(int32_t n_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool & operator=(const ThreadPool &) = delete;

    // A context that wants more threads than the pool has keeps its own: ggml does not check it. The context must be
    // detached (or freed) before the pool goes.
    void attach(llama_context * context) const;

  private:
    int32_t n_threads_;
    ggml_threadpool_t pool_ = nullptr;
    void (*free_)(ggml_threadpool_t) = nullptr;
};

} // namespace pyfly
