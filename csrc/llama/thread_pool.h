// One pool of CPU threads for all contexts of an object, and how many of them compute.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>

#include "cpu_time.h"
#include "ggml-cpu.h"
#include "llama.h"
#include "thread_policy.h"

namespace pyfly {

// A ggml thread pool, attached to contexts that run one after the other. Without it every context makes its own, and
// builds of ggml without OpenMP start and join threads for every batch. One of adaptive size chooses the thread count
// of the contexts that follow it before each evaluation.
class ThreadPool {
  public:
    struct Size {
        int32_t n, n_batch;     // threads for single tokens and for batches, >= 1; adaptive: at most
        bool is_adaptive;       // n changes with the load of the machine
        bool is_batch_adaptive; // so does n_batch; only with is_adaptive
    };

    // Where the CPU backend offers no pools, contexts have their own threads.
    explicit ThreadPool(Size size);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool & operator=(const ThreadPool &) = delete;

    // A context that wants more threads than the pool has keeps its own: ggml does not check it. The context must be
    // detached (or freed) before the pool goes.
    void attach(llama_context * context) const;

    // Calls `evaluate`, which evaluates n_rows tokens in a context that follows the pool's size.
    void run(llama_context * context, int32_t n_rows, const std::function<void()> & evaluate);

    const Size & size() const { return size_; }
    const std::optional<ThreadPolicy> & policy() const { return policy_; } // of an adaptive size

  private:
    ggml_threadpool_t pool(int32_t n) const;
    double unused_us(const UnusedCpu & before, const UnusedCpu & after, int32_t n_own) const;
    void begin_with_free_cores();
    void look_at_cores(std::chrono::steady_clock::time_point now, double cpu_us);

    Size size_;
    ggml_threadpool_t (*make_)(ggml_threadpool_params *) = nullptr;
    void (*free_)(ggml_threadpool_t) = nullptr;
    // By their thread count. In a pool that is larger than the graph's thread count the others would go on polling; a
    // pool that its context has exchanged for another one sleeps.
    mutable std::map<int32_t, ggml_threadpool_t> pools_;
    std::optional<ThreadPolicy> policy_;
    bool has_begun_ = false;

    // The last look at what the machine had left.
    std::chrono::steady_clock::time_point looked_at_ = {};
    double cpu_us_ = 0.0;
    UnusedCpu unused_ = {};
};

} // namespace pyfly
