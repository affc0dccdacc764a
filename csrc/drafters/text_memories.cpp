#include "text_memories.h"

#include <algorithm>

namespace pyfly {

TextMemories::TextMemories(Model & model) : model_(model), used_(static_cast<size_t>(model.n_sequences()), 0) {
    for (int32_t text = 0; text < model.n_sequences(); text++) {
        memories_.emplace_back(model, text);
    }
}

bool TextMemories::make_room(const std::vector<int32_t> & texts, size_t n_new) {
    now_++;
    for (const int32_t text : texts) {
        used_[static_cast<size_t>(text)] = now_;
    }
    while (true) {
        size_t n_held = 0, oldest = 0;
        int64_t used = now_;
        for (size_t i = 0; i < memories_.size(); i++) {
            n_held += memories_[i].n();
            if (memories_[i].n() > 0 && used_[i] < used) {
                oldest = i;
                used = used_[i];
            }
        }
        if (static_cast<int64_t>(n_held + n_new) <= model_.n_cells()) {
            return true;
        }
        if (used == now_) {
            return false;
        }
        memories_[oldest].clear();
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
            spans.push_back(at(part.text).span(part.tokens, part.n, part.first_row));
            spans.back().inputs = part.inputs;
        }
        try {
            model_.evaluate(spans);
        } catch (...) {
            for (const Span & span : spans) {
                at(span.sequence).failed();
            }
            throw;
        }
        n_batches_++;
        for (const Span & span : spans) {
            at(span.sequence).evaluated(span);
        }
        for (size_t i = 0; i < spans.size(); i++) {
            read(begin + i, i);
        }
    }
}

} // namespace pyfly
