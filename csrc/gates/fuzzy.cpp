// Fuzzy speculative decoding: a drafted token is accepted while the draft's distribution is close to the target's,
// whatever the token is. Source: Holsman et al. 2025 (arXiv 2502.20704), section 3 and appendix C. There a rejected
// token is replaced by a draw from the target, as here; matches are always accepted here, and control tokens never
// loosely.

#include <cmath>

#include "divergence.h"
#include "kinds.h"

namespace pyfly {

namespace {

class Fuzzy : public Gate {
  public:
    Fuzzy(Divergence kind, int32_t n_top, double threshold) : kind_(kind), n_top_(n_top), threshold_(threshold) {
        require(n_top >= 0, "the fuzzy gate's top must be >= 0");
        require(std::isfinite(threshold) && threshold >= 0.0,
                "the fuzzy gate's threshold must be a finite number >= 0");
    }
    bool defers(const Evidence & evidence) const override {
        return evidence.draft_row != nullptr && is_within(kind_, threshold_, evidence.target, evidence.row,
                                                          evidence.draft_row, evidence.n_vocab, n_top_);
    }
    bool needs_draft_row() const override { return true; }

  private:
    Divergence kind_;
    int32_t n_top_;
    double threshold_;
};

} // namespace

std::unique_ptr<Gate> make_fuzzy(const pyfly_gate_node & node) {
    const int32_t kind = node.kind - PYFLY_GATE_FUZZY_KL; // in the order of Divergence
    return std::make_unique<Fuzzy>(static_cast<Divergence>(kind), node.n, node.threshold);
}

} // namespace pyfly
