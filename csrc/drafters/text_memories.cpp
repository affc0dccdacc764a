#include "text_memories.h"

#include "stretch.h"

namespace pyfly {

TextMemories::TextMemories(Model & model, size_t first) : model_(model), first_(first) {
    for (int32_t text = 0; text < model.n_sequences(); text++) {
        texts_.push_back({Memory(model, text), first});
    }
}

size_t TextMemories::n_staying(int32_t text, const int32_t * tokens, size_t n, size_t offset) const {
    const std::vector<int32_t> & held = at(text).memory.tokens();
    return pyfly::n_staying(begin(text), held.data(), held.size(), tokens, n, offset);
}

void TextMemories::follow(int32_t text, const int32_t * tokens, size_t n, size_t offset) {
    at(text).memory.truncate(n_staying(text, tokens, n, offset));
    if (n_held(text) == 0) {
        at(text).begin = first_;
    }
}

void TextMemories::cut(int32_t text, size_t end) {
    at(text).memory.truncate(end - begin(text));
}

void TextMemories::clear(int32_t text, size_t begin) {
    at(text).memory.clear();
    at(text).begin = begin;
}

bool TextMemories::shift(int32_t text, size_t n) {
    const bool is_shifted = at(text).memory.shift(n);
    at(text).begin += is_shifted ? n : 0;
    return is_shifted;
}

bool TextMemories::make_room(const std::vector<int32_t> & texts, size_t n_new) {
    now_++;
    for (const int32_t text : texts) {
        at(text).used = now_;
    }
    while (true) {
        size_t n_taken = 0;
        int32_t oldest = 0;
        int64_t used = now_;
        for (int32_t text = 0; text < n(); text++) {
            n_taken += n_held(text);
            if (n_held(text) > 0 && at(text).used < used) {
                oldest = text;
                used = at(text).used;
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

void TextMemories::evaluate(const std::vector<Part> & parts,
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
            spans.push_back(at(part.text).memory.span(part.tokens, part.n, part.first_row));
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
