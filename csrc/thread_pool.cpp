#include "thread_pool.h"

#include <algorithm>

#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace pyfly {

ThreadPool::ThreadPool(int32_t n_threads) : n_threads_(n_threads) {
    // Looked up, not linked: builds with loadable backends have no ggml-cpu library to link to.
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) {
        return;
    }
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    const auto make = reinterpret_cast<decltype(&ggml_threadpool_new)>(
        ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_new"));
    free_ = reinterpret_cast<decltype(&ggml_threadpool_free)>(
        ggml_backend_reg_get_proc_address(registry, "ggml_threadpool_free"));
    if (make == nullptr || free_ == nullptr) {
        return;
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    pool_ = make(&params);
}

ThreadPool::~ThreadPool() {
    if (pool_ != nullptr) {
        free_(pool_);
    }
}

void ThreadPool::attach(llama_context * context) const {
    if (pool_ != nullptr && std::max(llama_n_threads(context), llama_n_threads_batch(context)) <= n_threads_) {
        llama_attach_threadpool(context, pool_, pool_);
    }
}

} // namespace pyfly
