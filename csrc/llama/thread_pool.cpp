#include "thread_pool.h"

#include <algorithm>
#include <thread>

#include "cpu_time.h"
#include "ggml-backend.h"

namespace pyfly {

namespace {

using Clock = std::chrono::steady_clock;

// The system counts in steps of 10 ms; what was free long ago says nothing.
constexpr std::chrono::milliseconds least_interval(100), longest_interval(1000);
constexpr std::chrono::milliseconds first_look(50);

double microseconds(Clock::duration time) {
    return std::chrono::duration<double, std::micro>(time).count();
}

} // namespace

ThreadPool::ThreadPool(Size size) : size_(size) {
    if (size.is_adaptive) {
        policy_.emplace(size.is_batch_adaptive ? std::max(size.n, size.n_batch) : size.n, unused_cpu().has_value());
    }
    // Looked up, not linked: builds with loadable backends have no ggml-cpu library to link to.
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) {
        return;
    }
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    make_ = reinterpret_cast<decltype(&ggml_threadpool_new)>(
        ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_new"));
    free_ = reinterpret_cast<decltype(&ggml_threadpool_free)>(
        ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_free"));
}

ThreadPool::~ThreadPool() {
    for (const auto & [n, pool] : pools_) {
        free_(pool);
    }
}

// The pool of n threads; null where the backend offers none.
ggml_threadpool_t ThreadPool::pool(int32_t n) const {
    if (make_ == nullptr || free_ == nullptr) {
        return nullptr;
    }
    const auto found = pools_.find(n);
    if (found != pools_.end()) {
        return found->second;
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n);
    ggml_threadpool_t pool = make_(&params);
    if (pool != nullptr) {
        pools_.emplace(n, pool);
    }
    return pool;
}

void ThreadPool::attach(llama_context * context) const {
    const int32_t n_wanted = std::max(llama_n_threads(context), llama_n_threads_batch(context));
    const int32_t n_most = std::max(size_.n, size_.n_batch);
    ggml_threadpool_t own = n_wanted <= n_most ? pool(n_most) : nullptr;
    if (own != nullptr) {
        llama_attach_threadpool(context, own, own);
    }
}

void ThreadPool::run(llama_context * context, int32_t n_rows, const std::function<void()> & evaluate) {
    if (!policy_ || (n_rows > 1 && !size_.is_batch_adaptive)) {
        evaluate();
        return;
    }
    if (!has_begun_) {
        has_begun_ = true;
        begin_with_free_cores();
    }
    const int32_t n = std::min(policy_->n_threads(), size_.n);
    const int32_t n_batch = size_.is_batch_adaptive ? std::min(policy_->n_threads(), size_.n_batch) : size_.n_batch;
    if (llama_n_threads(context) != n || llama_n_threads_batch(context) != n_batch) {
        llama_set_n_threads(context, n, n_batch);
        ggml_threadpool_t one = pool(n), batch = pool(n_batch);
        if (one != nullptr && batch != nullptr) {
            llama_attach_threadpool(context, one, batch);
        }
    }
    const Clock::time_point began = Clock::now();
    const double cpu_began = process_cpu_us();
    evaluate();
    const Clock::time_point ended = Clock::now();
    const double cpu_ended = process_cpu_us();
    policy_->observe(
        {reinterpret_cast<uintptr_t>(context), n_rows, microseconds(ended - began), cpu_ended - cpu_began});
    look_at_cores(ended, cpu_ended);
}

// CPU time between two looks that this process could have had; n_own: its threads that run now, or spin. What processes
// of low priority used counts if there is at most one on a core: of many, each takes its share (of nice 10, seven on a
// core take two fifths of it).
double ThreadPool::unused_us(const UnusedCpu & before, const UnusedCpu & after, int32_t n_own) const {
    const int32_t n_others = n_runnable().value_or(0) - n_own;
    const double low_priority_us = n_others <= policy_->n_max() ? after.low_priority_us - before.low_priority_us : 0.0;
    return after.idle_us - before.idle_us + low_priority_us;
}

// A prompt that all cores read although others keep some of them busy takes many times as long, and may be a single
// evaluation: nothing is learned in time.
void ThreadPool::begin_with_free_cores() {
    const Clock::time_point began = Clock::now();
    const std::optional<UnusedCpu> before = policy_->n_max() > 1 ? unused_cpu() : std::nullopt;
    if (before) {
        std::this_thread::sleep_for(first_look);
        if (const std::optional<UnusedCpu> after = unused_cpu()) {
            policy_->begin_with(unused_us(*before, *after, 1) / microseconds(Clock::now() - began));
        }
    }
}

// Tells the policy, if it wants to know, how many cores were this process's or nobody's since the last look.
void ThreadPool::look_at_cores(Clock::time_point now, double cpu_us) {
    if (!policy_->wants_cores() || now - looked_at_ < least_interval) {
        return;
    }
    const std::optional<UnusedCpu> unused = unused_cpu();
    if (!unused) {
        looked_at_ = {};
        return;
    }
    if (now - looked_at_ <= longest_interval) {
        const double n_cores =
            (cpu_us - cpu_us_ + unused_us(unused_, *unused, policy_->n_threads())) / microseconds(now - looked_at_);
        policy_->observe_cores(std::clamp(n_cores, 0.0, static_cast<double>(policy_->n_max()))); // CPUs come and go
    }
    looked_at_ = now;
    cpu_us_ = cpu_us;
    unused_ = *unused;
}

} // namespace pyfly
