#include "abort_guard.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <stdexcept>

#include "fork_safe.h"
#include "ggml.h"

namespace pyfly {

namespace {

std::mutex mutex;
[[maybe_unused]] const bool is_held_over_forks = hold_over_forks<mutex>();
int32_t n_in_process = 0;
std::atomic<ggml_abort_callback_t> previous = nullptr;
thread_local int32_t n_on_thread = 0;

void on_abort(const char * message) {
    if (n_on_thread > 0) {
        throw std::runtime_error(message);
    }
    // Another thread's; ggml says nothing itself where there is a callback.
    if (const ggml_abort_callback_t callback = previous) {
        callback(message);
    } else {
        std::fprintf(stderr, "%s\n", message);
    }
}

} // namespace

AbortGuard::AbortGuard() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (n_in_process++ == 0) {
        previous = ggml_set_abort_callback(on_abort);
    }
    n_on_thread++;
}

AbortGuard::~AbortGuard() {
    const std::lock_guard<std::mutex> lock(mutex);
    n_on_thread--;
    if (--n_in_process == 0) {
        ggml_set_abort_callback(previous);
    }
}

} // namespace pyfly
