#include "abort_guard.h"

#include <cstdio>
#include <stdexcept>

namespace pyfly {

namespace {

thread_local int32_t n_guards = 0;

void on_abort(const char * message) {
    if (n_guards > 0) {
        throw std::runtime_error(message);
    }
    std::fprintf(stderr, "%s\n", message); // another thread's; ggml says nothing where there is a callback
}

} // namespace

AbortGuard::AbortGuard() : previous_(ggml_set_abort_callback(on_abort)) {
    n_guards++;
}

AbortGuard::~AbortGuard() {
    n_guards--;
    ggml_set_abort_callback(previous_);
}

} // namespace pyfly
