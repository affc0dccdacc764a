#include "scripted_target.h"

#include <string>

#include "error.h"

namespace pyfly {

ScriptedTarget::ScriptedTarget(int32_t n_vocab, int32_t n_ctx, int32_t n_batch, pyfly_row_callback row, void * user)
    : Target(n_vocab > 0 ? n_vocab : 0), n_vocab_(n_vocab), n_ctx_(n_ctx), n_batch_(n_batch), row_(row), user_(user) {
    if (n_vocab < 1 || n_ctx < 1 || n_batch < 1 || row == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "a scripted target needs n_vocab, n_ctx and n_batch >= 1 and a row callback");
    }
}

void ScriptedTarget::evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) {
    if (static_cast<size_t>(n_past) != memory_.size() || memory_.size() + n > static_cast<size_t>(n_ctx_) ||
        n > static_cast<size_t>(n_batch_)) {
        throw Error(PYFLY_STATUS_INTERNAL, "the scripted target was asked to evaluate at position " +
                                               std::to_string(n_past) + " of " + std::to_string(memory_.size()));
    }
    first_row_ = first_row;
    rows_.resize((n - first_row) * static_cast<size_t>(n_vocab_));
    for (size_t i = 0; i < n; i++) {
        memory_.push_back(tokens[i]);
        if (i < first_row) {
            continue;
        }
        float * out = rows_.data() + (i - first_row) * static_cast<size_t>(n_vocab_);
        if (row_(user_, memory_.data(), memory_.size(), out) != 0) {
            memory_.resize(static_cast<size_t>(n_past));
            throw Error(PYFLY_STATUS_CALLBACK, "the scripted target's row callback stopped");
        }
    }
}

const float * ScriptedTarget::row(size_t i) {
    return rows_.data() + (i - first_row_) * static_cast<size_t>(n_vocab_);
}

void ScriptedTarget::truncate(int32_t n) {
    if (static_cast<size_t>(n) < memory_.size()) {
        memory_.resize(static_cast<size_t>(n));
    }
}

} // namespace pyfly
