#include "slot_memories.h"

#include "stretch.h"

namespace pyfly {

SlotMemories::SlotMemories(Model & model, size_t first) : model_(model), first_(first) {
    for (int32_t slot = 0; slot < model.n_sequences(); slot++) {
        slots_.push_back({Memory(model, slot), first});
    }
}

size_t SlotMemories::n_staying(int32_t slot, const int32_t * tokens, size_t n, size_t offset) const {
    const std::vector<int32_t> & held = at(slot).memory.tokens();
    return pyfly::n_staying(begin(slot), held.data(), held.size(), tokens, n, offset);
}

void SlotMemories::follow(int32_t slot, const int32_t * tokens, size_t n, size_t offset) {
    at(slot).memory.truncate(n_staying(slot, tokens, n, offset));
    if (n_held(slot) == 0) {
        at(slot).begin = first_;
    }
}

void SlotMemories::cut(int32_t slot, size_t end) {
    at(slot).memory.truncate(end - begin(slot));
}

void SlotMemories::clear(int32_t slot, size_t begin) {
    at(slot).memory.clear();
    at(slot).begin = begin;
}

bool SlotMemories::shift(int32_t slot, size_t n) {
    const bool is_shifted = at(slot).memory.shift(n);
    at(slot).begin += is_shifted ? n : 0;
    return is_shifted;
}

void SlotMemories::share(int32_t from, int32_t to, const int32_t * tokens, size_t n) {
    const Memory & memory = at(from).memory;
    if (begin(from) != first_ || n < first_) {
        return;
    }
    const size_t n_more = memory.n_shareable(memory.n_common(tokens + first_, n - first_));
    const size_t n_own = n_staying(to, tokens, n);
    if (n_more > 0 && first_ + n_more > (n_own > 0 ? begin(to) + n_own : 0)) {
        at(to).memory.share(memory, n_more);
        at(to).begin = first_;
    }
}

bool SlotMemories::make_room(const std::vector<int32_t> & slots, size_t n_new) {
    now_++;
    for (const int32_t slot : slots) {
        at(slot).used = now_;
    }
    while (true) {
        size_t n_taken = 0;
        int32_t oldest = 0;
        int64_t used = now_;
        for (int32_t slot = 0; slot < n(); slot++) {
            n_taken += n_held(slot);
            if (n_held(slot) > 0 && at(slot).used < used) {
                oldest = slot;
                used = at(slot).used;
            }
        }
        if (static_cast<int64_t>(n_taken + n_new) <= model_.n_cells()) {
            return true;
        }
        if (used == now_) {
            return false;
        }
        clear(oldest);
    }
}

void SlotMemories::evaluate(const std::vector<Part> & parts,
                            const std::function<void(size_t part, size_t span)> & read) {
    std::vector<Span> spans;
    for (size_t begin = 0; begin < parts.size(); begin += spans.size()) {
        spans.clear();
        size_t n = 0;
        for (size_t i = begin; i < parts.size(); i++) {
            const Part & part = parts[i];
            n += part.n;
            if (n > static_cast<size_t>(model_.n_batch())) {
                break;
            }
            spans.push_back(at(part.slot).memory.span(part.tokens, part.n, part.first_row));
            spans.back().inputs = part.inputs;
        }
        try {
            model_.evaluate(spans);
        } catch (...) {
            for (const Span & span : spans) {
                at(span.sequence).memory.failed();
            }
            throw;
        }
        for (const Span & span : spans) {
            at(span.sequence).memory.evaluated(span);
        }
        for (size_t i = 0; i < spans.size(); i++) {
            read(begin + i, i);
        }
    }
}

} // namespace pyfly
