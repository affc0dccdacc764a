#include "memory.h"

#include <algorithm>
#include <iterator>

#include "common_prefix.h"
#include "error.h"

namespace pyfly {

size_t Memory::n_common(const int32_t * text, size_t n_text) const {
    return pyfly::n_common(tokens_.data(), tokens_.size(), text, n_text);
}

void Memory::assume(std::vector<int32_t> tokens) {
    tokens_ = std::move(tokens);
    tokens_.resize(static_cast<size_t>(model_->truncate(sequence_, static_cast<int32_t>(tokens_.size()))));
}

size_t Memory::truncate(size_t n) {
    // Of a limited memory more may be gone already: that of others, when a batch fails (Model::evaluate).
    if (n < tokens_.size() || (model_->is_limited() && !tokens_.empty())) {
        const size_t most = std::min(n, tokens_.size());
        tokens_.resize(static_cast<size_t>(model_->truncate(sequence_, static_cast<int32_t>(most))));
    }
    return tokens_.size();
}

void Memory::settle() {
    try {
        model_->settle(sequence_);
    } catch (const Error &) {
        tokens_.clear();
        forget_other_checkpoints(tokens_.data(), 0);
        model_->truncate(sequence_, 0);
        throw;
    }
}

void Memory::release() {
    try {
        settle();
    } catch (const Error &) { // everything is lost
    }
}

void Memory::clear() {
    forget_other_checkpoints(tokens_.data(), 0);
    truncate(0);
    release(); // others need the room now
}

Span Memory::span(const int32_t * tokens, size_t n, size_t first_row) const {
    return {sequence_, tokens, n, tokens_.size(), first_row, nullptr, is_checkpointed()};
}

void Memory::evaluated(const Span & span) {
    tokens_.insert(tokens_.end(), span.tokens, span.tokens + span.n);
}

void Memory::failed() {
    assume(std::move(tokens_));
    release(); // what is lost makes room
}

bool Memory::checkpoint(bool is_kept) {
    forget_other_checkpoints(tokens_.data(), tokens_.size());
    if (!model_->checkpoint(sequence_, is_kept)) {
        return false;
    }
    checkpointed_ = tokens_;
    return true;
}

bool Memory::is_checkpointed() const {
    const Checkpoints * all = model_->checkpoints(sequence_);
    return all != nullptr && all->has(static_cast<int32_t>(n()));
}

std::vector<Checkpoints::Checkpoint> Memory::kept() const {
    std::vector<Checkpoints::Checkpoint> out;
    if (const Checkpoints * all = model_->checkpoints(sequence_)) {
        std::copy_if(all->all().begin(), all->all().end(), std::back_inserter(out),
                     [](const auto & c) { return c.is_kept; });
    }
    return out;
}

size_t Memory::n_kept() const {
    const Checkpoints * all = model_->checkpoints(sequence_);
    return all == nullptr ? 0 : static_cast<size_t>(all->n_kept(static_cast<int32_t>(n())));
}

void Memory::forget_other_checkpoints(const int32_t * text, size_t n_text) {
    if (Checkpoints * all = model_->checkpoints(sequence_)) {
        checkpointed_.resize(pyfly::n_common(checkpointed_.data(), checkpointed_.size(), text, n_text));
        all->forget_behind(static_cast<int32_t>(checkpointed_.size()));
    }
}

void Memory::restore_checkpoint(const int32_t * tokens, size_t n, Checkpoints::State state) {
    if (Checkpoints * all = model_->checkpoints(sequence_)) {
        forget_other_checkpoints(tokens, n);
        checkpointed_.assign(tokens, tokens + n);
        all->add(static_cast<int32_t>(n), std::move(state), true);
    }
}

size_t Memory::n_shareable(size_t n) const {
    return static_cast<size_t>(model_->n_copyable(sequence_, static_cast<int32_t>(n)));
}

bool Memory::share(const Memory & from, size_t n) {
    clear();
    if (!model_->copy(from.sequence_, sequence_, static_cast<int32_t>(n))) {
        return false;
    }
    tokens_.assign(from.tokens_.begin(), from.tokens_.begin() + static_cast<std::ptrdiff_t>(n));
    if (model_->checkpoints(sequence_) != nullptr) {
        checkpointed_ = tokens_;
    }
    return true;
}

bool Memory::shift(size_t n) {
    if (!model_->shift(sequence_, static_cast<int32_t>(n))) {
        return false;
    }
    tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(n));
    return true;
}

} // namespace pyfly
