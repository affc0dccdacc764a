// What the texts of a drafter have in its own model. No llama.h.
#pragma once

#include <functional>
#include <vector>

#include "memory.h"

namespace pyfly {

// The memories share the model's cells.
class TextMemories {
  public:
    // One for each sequence of the model, which is borrowed.
    explicit TextMemories(Model & model);

    Memory & at(int32_t text) { return memories_[static_cast<size_t>(text)]; }
    const Memory & at(int32_t text) const { return memories_[static_cast<size_t>(text)]; }
    int32_t n() const { return static_cast<int32_t>(memories_.size()); }

    // Makes room for n_new more tokens of these texts: others are forgotten where it takes that, the one that was used
    // longest ago first. False if that is not enough.
    bool make_room(const std::vector<int32_t> & texts, size_t n_new);

    // Tokens of a text, to be evaluated behind what its memory holds. Borrowed.
    struct Part {
        int32_t text;
        const int32_t * tokens; // [n], 1 <= n <= the model's n_batch
        size_t n;
        size_t first_row;
        const float * inputs = nullptr; // see Span
    };

    // Evaluates parts of different texts in as few batches as it takes and calls read(part, span) for each while the
    // rows of its batch are valid. On an Error the memories hold what is left.
    void evaluate(const std::vector<Part> & parts, const std::function<void(size_t part, size_t span)> & read);

    int64_t n_batches() const { return n_batches_; } // evaluated so far

  private:
    Model & model_;
    std::vector<Memory> memories_;
    std::vector<int64_t> used_; // when each was used last
    int64_t now_ = 0;
    int64_t n_batches_ = 0;
};

} // namespace pyfly
