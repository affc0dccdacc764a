// Gates: what may happen to a drafted token that is not the target's choice. One file each; kinds.h lists them. No
// llama.h.
#pragma once

#include <memory>
#include <string>

#include "pyfly.h"
#include "rows.h"

namespace pyfly {

// What a gate may look at, at a mismatch. Nothing of it outlives the question.
struct Evidence {
    const RowStats & target; // of the target's row, after what forbids or reweighs tokens and before temperature; with
                             // top-n for the gate's n_top()
    const float * row;       // [n_vocab], this row
    size_t n_vocab;
    int32_t drafted;          // token
    float drafted_logit;      // in the target's row; -inf if it is forbidden
    const float * draft_row;  // [n_vocab], the drafter's own; null if it has none
    const int32_t * answered; // [n_answered], the tokens of this answer before it; null where no gate looks at them
    int64_t n_answered;       // >= 0

    // ln p(top 1) - ln p(drafted), nats, >= 0. The normaliser cancels.
    double margin() const { return static_cast<double>(target.max.logit) - static_cast<double>(drafted_logit); }
    double p_top() const;     // p(top 1)
    double p_drafted() const; // p(drafted)
};

class Gate {
  public:
    virtual ~Gate() = default;

    // Whether the window may decide; else the drafted token is rejected now.
    virtual bool defers(const Evidence & evidence) const = 0;

    virtual int32_t n_top() const { return 0; } // most probable tokens that it looks at, 0..max_top

    // Whether it looks at the drafter's row. Without one it does not defer.
    virtual bool needs_draft_row() const { return false; }

    // Whether drafts and the target's choices are drawn by speculative sampling (speculative.h).
    virtual bool draws() const { return false; }
    virtual bool looks_at_answer() const { return false; } // at its tokens

    // Whether entropies that are reported are the top-n ones, with n = n_top().
    virtual bool reports_top_entropy() const { return false; }
};

// Throws Error(PYFLY_STATUS_INVALID) unless `condition` holds.
void require(bool condition, const std::string & message);

// The same where a number is outside its range; `what` names it.
void require_nats(double value, const std::string & what);  // finite, >= 0
void require_share(double value, const std::string & what); // in [0, 1]
void require_top(int32_t n, const std::string & what);      // in 1..max_top

} // namespace pyfly
