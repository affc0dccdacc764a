// What proposes tokens for the target. One file per drafter beside this one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyfly {

struct RowStats;

// A drafter follows one sequence. It is always shown the whole token history and compares it with what it has seen, so
// that nothing it holds can go stale: a rollback, another prompt or a caller that stops midway need no notice.
class Drafter {
  public:
    virtual ~Drafter() = default;

    // Catches up with at most one batch of `history`, so that a long prompt can be interrupted. Returns how many tokens
    // are left to catch up with; call again until it is 0.
    virtual size_t prepare(const std::vector<int32_t> & history) {
        (void) history;
        return 0;
    }

    // Tokens of `history` that prepare() would evaluate now, about; 0 for a drafter that has nothing to catch up with.
    virtual size_t n_behind(const std::vector<int32_t> & history) const {
        (void) history;
        return 0;
    }

    // The target has just evaluated tokens[n] at positions n_past, n_past + 1, ..., some of which may be drafts that do
    // not survive. A drafter that reads the target's hidden states takes them here, before the next batch replaces
    // them.
    virtual void observe(const int32_t * tokens, size_t n, int32_t n_past) {
        (void) tokens;
        (void) n;
        (void) n_past;
    }

    // Proposes at most n_max tokens to follow `history` (not empty), to `out` (empty on entry). None is a valid answer.
    virtual void draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) = 0;

    // Whether a draft costs nothing worth counting: it may be asked for only to see whether it would have been right.
    virtual bool is_free() const { return false; }

    // What drafting a token costs, relative to the target's evaluating one, as far as it is known before it was
    // measured; 0: not known.
    virtual double expected_cost() const { return 0.0; }

    // Class of the last draft, 0..7: drafts of one class are about equally likely to be right. The governor keeps
    // acceptance by class.
    virtual int32_t proposal_class() const { return 0; }

    // Full rows of the last draft, one for each proposed token, for gates that want the draft's distribution
    // (Gate::needs_draft_row). Null where the drafter has no distribution.
    virtual const RowStats * row(size_t i) const {
        (void) i;
        return nullptr;
    }

    // Tokens evaluated on a model of its own so far.
    virtual int64_t n_evaluated() const { return 0; }
};

} // namespace pyfly
