// Bounded overshoot: the draft's probability of its token may exceed the target's at most by a factor, q(drafted) <=
// bound p(drafted). Source: arXiv 2607.26627, as others describe its rule; the paper itself could not be read here.

#include <cmath>

#include "divergence.h"
#include "rules.h"

namespace pyfly {

namespace {

class Overshoot : public Rule {
  public:
    explicit Overshoot(double bound) : ln_bound_(std::log(bound)) {
        require(std::isfinite(bound) && bound >= 1.0, "the overshoot gate's bound must be a finite number >= 1");
    }
    bool defers(const Evidence & evidence) const override {
        if (evidence.draft_row == nullptr) {
            return false;
        }
        const RowStats draft = row_stats(evidence.draft_row, evidence.n_vocab, 0);
        require_draft_row(draft.max);
        const double ln_q = draft.log_prob(evidence.draft_row[static_cast<size_t>(evidence.drafted)]);
        return ln_q <= ln_bound_ + evidence.target.log_prob(evidence.drafted_logit);
    }
    bool needs_draft_row() const override { return true; }

  private:
    double ln_bound_;
};

} // namespace

std::unique_ptr<Rule> make_overshoot(const pyfly_gate_node & node) {
    return std::make_unique<Overshoot>(node.threshold);
}

} // namespace pyfly
