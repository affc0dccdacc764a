#include "scripted_model.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace pyfly {

namespace {

void restore(const std::vector<uint8_t> & state, std::vector<int32_t> & memory) {
    memory.resize(state.size() / sizeof(int32_t));
    std::copy_n(reinterpret_cast<const int32_t *>(state.data()), memory.size(), memory.data());
}

} // namespace

ScriptedModel::ScriptedModel(const pyfly_scripted_config & config, pyfly_row_callback row, void * user)
    : config_(config), row_(row), user_(user) {
    if (config.n_vocab < 1 || config.n_ctx < 1 || config.n_batch < 1 || config.n_sequences < 1 || config.n_cells < 1 ||
        config.n_snapshots < -1 || row == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "a scripted target needs sizes >= 1, n_snapshots >= -1 and a row callback");
    }
    held_.resize(static_cast<size_t>(config.n_sequences));
    for (Held & held : held_) {
        if (is_recurrent()) {
            held.rewind.emplace(config.n_snapshots);
        }
    }
}

void ScriptedModel::evaluate(const std::vector<Span> & spans) {
    size_t n_new = 0, n_held = 0, n_rows = 0;
    first_.clear();
    skip_.clear();
    for (const Span & span : spans) {
        act(at(span.sequence));
        if (span.n_past != at(span.sequence).memory.size() ||
            span.n_past + span.n > static_cast<size_t>(config_.n_ctx)) {
            throw Error(PYFLY_STATUS_INTERNAL, "the scripted target was asked to evaluate at position " +
                                                   std::to_string(span.n_past) + " of " +
                                                   std::to_string(at(span.sequence).memory.size()));
        }
        n_new += span.n;
        first_.push_back(n_rows);
        skip_.push_back(span.first_row);
        n_rows += span.n - span.first_row;
    }
    for (const Held & held : held_) {
        n_held += held.memory.size();
    }
    if (n_new > static_cast<size_t>(config_.n_batch)) {
        throw Error(PYFLY_STATUS_INTERNAL, "the scripted target was given more than a batch");
    }
    if (static_cast<int64_t>(n_held + n_new) > config_.n_cells) {
        throw Error(PYFLY_STATUS_CONTEXT_FULL, "the scripted target's cache is full");
    }
    rows_.resize(n_rows * static_cast<size_t>(config_.n_vocab));
    for (size_t s = 0; s < spans.size(); s++) {
        const Span & span = spans[s];
        std::vector<int32_t> & memory = at(span.sequence).memory;
        for (size_t i = 0; i < span.n; i++) {
            memory.push_back(span.tokens[i]);
            if (i < span.first_row) {
                continue;
            }
            float * out = rows_.data() + (first_[s] + i - span.first_row) * static_cast<size_t>(config_.n_vocab);
            if (row_(user_, memory.data(), memory.size(), out) != 0) {
                for (const Span & each : spans) { // a recurrent memory is lost
                    std::vector<int32_t> & held = at(each.sequence).memory;
                    held.resize(is_recurrent() ? 0 : std::min(held.size(), each.n_past));
                }
                throw Error(PYFLY_STATUS_CALLBACK, "the scripted target's row callback stopped");
            }
        }
    }
    for (const Span & span : spans) {
        if (is_recurrent()) {
            at(span.sequence).rewind->evaluated(span.n);
        }
    }
}

const float * ScriptedModel::row(size_t span, size_t i) {
    if (span >= first_.size()) {
        throw Error(PYFLY_STATUS_INTERNAL, "the rows of span " + std::to_string(span) + " are gone");
    }
    return rows_.data() + (first_[span] + i - skip_[span]) * static_cast<size_t>(config_.n_vocab);
}

int32_t ScriptedModel::truncate(int32_t sequence, int32_t n) {
    Held & held = at(sequence);
    const int32_t n_held = static_cast<int32_t>(held.memory.size());
    if (held.rewind) {
        return held.rewind->truncate(n_held, n);
    }
    held.memory.resize(static_cast<size_t>(std::min(n, n_held)));
    return std::min(n, n_held);
}

void ScriptedModel::act(Held & held) {
    if (!held.rewind) {
        return;
    }
    const Rewind::Plan plan = held.rewind->take();
    if (plan.way == Rewind::Way::checkpoint) {
        restore(*plan.state, held.memory);
    } else if (plan.way != Rewind::Way::stay) {
        held.memory.resize(static_cast<size_t>(plan.n));
    }
}

bool ScriptedModel::checkpoint(int32_t sequence, bool is_kept) {
    Held & held = at(sequence);
    if (!held.rewind) {
        return true;
    }
    if (!can_checkpoint()) {
        return false;
    }
    act(held);
    const int32_t n = static_cast<int32_t>(held.memory.size());
    Checkpoints & all = held.rewind->checkpoints();
    if (is_kept) {
        all.keep(n);
    }
    if (!all.has(n)) {
        const auto state = all.take_buffer();
        state->resize(held.memory.size() * sizeof(int32_t));
        std::copy_n(held.memory.data(), held.memory.size(), reinterpret_cast<int32_t *>(state->data()));
        all.add(n, state, is_kept);
    }
    return true;
}

Checkpoints * ScriptedModel::checkpoints(int32_t sequence) {
    return at(sequence).rewind ? &at(sequence).rewind->checkpoints() : nullptr;
}

void ScriptedModel::settle(int32_t sequence) {
    act(at(sequence));
    if (at(sequence).rewind) {
        at(sequence).rewind->forget_batch();
    }
}

bool ScriptedModel::copy(int32_t from, int32_t to, int32_t n) {
    if (!can_copy() || n != n_copyable(from, n)) {
        return false;
    }
    const std::vector<int32_t> & memory = at(from).memory;
    at(to).memory.assign(memory.begin(), memory.begin() + n);
    if (at(to).rewind) {
        const Checkpoints & own = at(from).rewind->checkpoints();
        restore(*own.longest(n)->state, at(to).memory);
        at(to).rewind->checkpoints().share(own, n);
    }
    return true;
}

} // namespace pyfly
