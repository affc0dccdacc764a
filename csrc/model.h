// What the core needs of a model: it evaluates tokens of several sequences at once and can forget their last ones. No
// llama.h: llama/llama_model.* is the real one, scripted_model.* serves tests. Targets, draft models and heads are
// Models; memory.h keeps what one sequence has in one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpoints.h"

namespace pyfly {

// Tokens of one sequence, to be evaluated at positions n_past, n_past + 1, ... The pointers are borrowed.
struct Span {
    int32_t sequence;
    const int32_t * tokens; // [n], n >= 1
    size_t n;
    size_t n_past;                  // what the sequence holds before
    size_t first_row;               // rows are wanted of the tokens from this index on; n: of none
    const float * inputs = nullptr; // heads: what goes with each token, [n][input width]; else null
    bool may_return = false;        // what the sequence holds before is checkpointed: it may be cut back to that
};

class Model {
  public:
    virtual ~Model() = default;

    virtual int32_t n_vocab() const = 0;
    virtual int32_t n_ctx() const = 0;   // positions that one sequence can hold
    virtual int32_t n_batch() const = 0; // most tokens in one evaluate(), of all spans together
    virtual int32_t n_sequences() const { return 1; }
    virtual int64_t n_cells() const { return static_cast<int64_t>(n_ctx()) * n_sequences(); } // that all hold together

    // Evaluates spans of different sequences in one batch. Throws Error; then each of the sequences holds what it held
    // before, or less where the memory cannot go back to that: truncate(sequence, n_past) tells. Where the depth of
    // going back is limited, other sequences may have lost what they held, too. CONTEXT_FULL: there was no room for all
    // of them.
    virtual void evaluate(const std::vector<Span> & spans) = 0;

    // Logits row [n_vocab] that follows the token at index i >= first_row of a span of the last evaluate(). Valid until
    // the next.
    virtual const float * row(size_t span, size_t i) = 0;

    // Forgets every position >= n and returns how many are left: n, or fewer where the memory cannot go back to exactly
    // n (recurrent states, pruned sliding windows) or held fewer. The caller evaluates the tokens in between again.
    virtual int32_t truncate(int32_t sequence, int32_t n) = 0;

    // How many of the tokens of a sequence's last span, never all of them, truncate() can take back exactly.
    // unlimited: any number, of any span, save where a sliding window has moved on.
    static constexpr int32_t unlimited = INT32_MAX;
    virtual int32_t rewind_depth() const { return unlimited; }
    bool is_limited() const { return rewind_depth() != unlimited; }

    // Where the depth is limited: copies the present state, so that truncate(m) leaves at least the positions of now
    // for every later m >= them. One such state is there for each sequence, the latest; is_kept: this one is kept as
    // well, until the sequence is cut to less, or room is needed. False if the memory cannot do that.
    virtual bool checkpoint(int32_t sequence, bool is_kept) {
        (void) sequence, (void) is_kept;
        return true;
    }

    // The states of a sequence that were copied; those of more positions than it holds are of no use. nullptr: the
    // memory is not recurrent.
    virtual Checkpoints * checkpoints(int32_t sequence) {
        (void) sequence;
        return nullptr;
    }

    virtual bool can_checkpoint() const { return true; }

    // Whether position n, which truncate() can go back to now, will still be within reach when n_more tokens have been
    // evaluated, if need be by way of a checkpoint made now. A guess where the memory decides that as it goes (sliding
    // windows); truncate() itself never guesses.
    virtual bool can_return(int32_t sequence, int32_t n, int32_t n_more) const {
        (void) sequence, (void) n, (void) n_more;
        return !is_limited() || can_checkpoint();
    }

    // Whether positions can be taken back at all. Where they cannot, nobody speculates.
    bool can_rewind() const { return rewind_depth() > 0 || can_checkpoint(); }

    // Somebody else may use the memory now: it holds what the last truncate() left.
    virtual void settle(int32_t sequence) { (void) sequence; }

    // Whether a batch takes less time behind others of its size: backends for GPUs record what they run.
    virtual bool is_faster_in_a_row() const { return false; }

    // Whether sequences can share positions.
    virtual bool can_copy() const { return false; }

    // How many of the first n positions of a sequence another one can have: of a recurrent memory, those of a kept
    // checkpoint.
    int32_t n_copyable(int32_t sequence, int32_t n) {
        const Checkpoints * own = checkpoints(sequence);
        return !can_copy() ? 0 : own == nullptr ? n : own->n_kept(n);
    }

    // The sequence `to`, which holds nothing, gets the first n positions of `from`, n = n_copyable(from, n). False,
    // and `to` holds nothing, where the memory cannot share them.
    virtual bool copy(int32_t from, int32_t to, int32_t n) {
        (void) from, (void) to, (void) n;
        return false;
    }

    // Forgets the first n positions; those behind move up to take their places. False, and nothing changed, where the
    // memory cannot do that.
    virtual bool shift(int32_t sequence, int32_t n) {
        (void) sequence, (void) n;
        return false;
    }
};

} // namespace pyfly
