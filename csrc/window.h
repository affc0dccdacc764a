// The deferral window: decides whether a deferred mismatch stands, from what happens in the W positions after it.
// No llama.h.
//
// The machine is told of every position in order, as it happens, and answers with what it decided. It knows nothing of
// tokens or logits, and it does not care where a step ends unless the window may not outlive its step; so the same
// machine serves one step, windows across steps, and the judgement of single positions.
//
// Several may be open at a time. Each is decided for itself, by what comes after it: where one breaks, older ones stay
// open, and what they have decided by then stays decided.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pyfly.h"

namespace pyfly {

class Window {
  public:
    // Throws Error(PYFLY_STATUS_INVALID) for a size < 0, an unknown rule, a tail < -1, or agree across steps.
    explicit Window(const pyfly_window_config & config);

    // A rejected mismatch: the sequence must roll back to it, and the target's choice there be emitted.
    struct Rejection {
        int64_t position;
        pyfly_reason reason; // PYFLY_REASON_WINDOW or _BOUNDARY
    };
    using Outcome = std::optional<Rejection>; // after a rejection no window from there on is open

    // Whether a mismatch with `n_left` drafted positions behind it in its step may be deferred at all. If not, it is
    // rejected at once, with PYFLY_REASON_BOUNDARY.
    bool fits(int64_t n_left) const;

    // One call for each position, positions rising:
    Outcome match(int64_t position);    // drafted, and the target's choice
    Outcome deferred(int64_t position); // a mismatch that may be deferred (requires fits): opens one
    Outcome rejected(int64_t position); // a mismatch rejected at once; the target's own token takes its place
    Outcome own(int64_t position);      // the target's own token with nothing drafted: a bonus
    Outcome end_of_step();              // what may not outlive the step is rejected here

    // Rejects the oldest open window, if there is one, whatever it may outlive: nothing will decide it.
    Outcome give_up();

    // The same under reconverge alone: nothing is drafted that could match.
    Outcome silence();

    // Oldest undecided mismatch, if there is one: everything from there on is provisional.
    std::optional<int64_t> oldest_open() const {
        return open_.empty() ? std::nullopt : std::optional<int64_t>(open_.front());
    }

    // Whether the mismatch at `position` is still undecided.
    bool is_open(int64_t position) const;

  private:
    bool has_passed(int64_t open, int64_t position) const;
    template <typename Condition> Outcome reject_oldest(pyfly_reason reason, Condition && condition);

    pyfly_window_config config_;
    std::vector<int64_t> open_; // undecided mismatches, positions rising
};

} // namespace pyfly
