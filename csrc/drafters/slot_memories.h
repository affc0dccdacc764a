// What the requests of a drafter have in its own model. No llama.h.
#pragma once

#include <functional>
#include <vector>

#include "memory.h"

namespace pyfly {

// Each memory is of a stretch of its request's tokens (stretch.h). The memories share the model's cells.
class SlotMemories {
  public:
    // One for each sequence of the model, which is borrowed. first: the position at which requests begin in it.
    explicit SlotMemories(Model & model, size_t first = 0);

    int32_t n() const { return static_cast<int32_t>(slots_.size()); }

    // Positions begin ... end - 1 of a request are held.
    size_t begin(int32_t slot) const { return at(slot).begin; }
    size_t end(int32_t slot) const { return begin(slot) + n_held(slot); }
    size_t n_held(int32_t slot) const { return at(slot).memory.n(); }

    // How many of them stay for a history of which tokens[n] are those from position `offset` on.
    size_t n_staying(int32_t slot, const int32_t * tokens, size_t n, size_t offset = 0) const;

    // Another history: keeps what stays of them, or less where the model cannot go back to exactly that.
    void follow(int32_t slot, const int32_t * tokens, size_t n, size_t offset = 0);

    // Keeps those before position `end` >= begin: of the same request, so the stretch begins where it did.
    void cut(int32_t slot, size_t end);

    // Nothing is held; the stretch begins where requests do, or at this position.
    void clear(int32_t slot) { clear(slot, first_); }
    void clear(int32_t slot, size_t begin);

    // The stretch begins n positions further on. False, and nothing changed, where the model cannot do that.
    bool shift(int32_t slot, size_t n);

    // `to`, of whose request these are the first n tokens, takes over what `from` holds of them, if that is more than
    // what stays of its own.
    void share(int32_t from, int32_t to, const int32_t * tokens, size_t n);

    // Makes room for n_new more tokens of these requests: others are forgotten where it takes that, the one that was
    // used longest ago first. False if that is not enough.
    bool make_room(const std::vector<int32_t> & slots, size_t n_new);

    // Tokens of a request, to be evaluated behind what its memory holds. Borrowed.
    struct Part {
        int32_t slot;
        const int32_t * tokens; // [n], 1 <= n <= the model's n_batch
        size_t n;
        size_t first_row;
        const float * inputs = nullptr; // see Span
    };

    // Evaluates parts of different requests in as few batches as it takes and calls read(part, span) for each while the
    // rows of its batch are valid. On an Error the memories hold what is left.
    void evaluate(const std::vector<Part> & parts, const std::function<void(size_t part, size_t span)> & read);

  private:
    struct Held {
        Memory memory;
        size_t begin;
        int64_t used = 0; // when it was used last
    };

    Held & at(int32_t slot) { return slots_[static_cast<size_t>(slot)]; }
    const Held & at(int32_t slot) const { return slots_[static_cast<size_t>(slot)]; }

    Model & model_;
    size_t first_;
    std::vector<Held> slots_;
    int64_t now_ = 0;
};

} // namespace pyfly
