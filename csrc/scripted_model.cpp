#include "scripted_target.h"

#include <algorithm>
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
    act();
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
            memory_.resize(rollback_ ? 0 : static_cast<size_t>(n_past));
            throw Error(PYFLY_STATUS_CALLBACK, "the scripted target's row callback stopped");
        }
    }
    if (rollback_) {
        rollback_->evaluated(n);
    }
}

const float * ScriptedTarget::row(size_t i) {
    return rows_.data() + (i - first_row_) * static_cast<size_t>(n_vocab_);
}

void ScriptedTarget::limit(int32_t n_snapshots, bool has_checkpoints) {
    if (n_snapshots < 0) {
        throw Error(PYFLY_STATUS_INVALID, "a scripted target needs n_snapshots >= 0");
    }
    rollback_.emplace(n_snapshots);
    has_checkpoints_ = has_checkpoints;
}

int32_t ScriptedTarget::truncate(int32_t n) {
    const int32_t n_held = static_cast<int32_t>(memory_.size());
    if (rollback_) {
        return rollback_->truncate(n_held, n);
    }
    memory_.resize(static_cast<size_t>(std::min(n, n_held)));
    return std::min(n, n_held);
}

void ScriptedTarget::act() {
    if (!rollback_) {
        return;
    }
    const Rollback::Plan plan = rollback_->take();
    if (plan.way == Rollback::Way::checkpoint) {
        memory_ = checkpoint_;
    } else if (plan.way != Rollback::Way::stay) {
        memory_.resize(static_cast<size_t>(plan.n));
    }
}

bool ScriptedTarget::checkpoint() {
    if (rollback_ && !rollback_->will_restore_checkpoint()) {
        if (!has_checkpoints_) {
            return false;
        }
        act();
        checkpoint_ = memory_;
        rollback_->checkpointed(static_cast<int32_t>(memory_.size()));
    }
    return true;
}

void ScriptedTarget::forget_checkpoint() {
    if (rollback_) {
        rollback_->forget_checkpoint();
    }
}

void ScriptedTarget::settle() {
    act();
    if (rollback_) {
        rollback_->forget_batch();
    }
}

} // namespace pyfly
