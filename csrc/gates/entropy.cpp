// The target is undecided: the entropy of its row is at least theta.

#include <algorithm>
#include <cmath>

#include "kinds.h"

namespace pyfly {

namespace {

// Of the n most probable tokens, not renormalised, nats: the FLy reference code (fly/models/FLy.py).
class EntropyTop : public Gate {
  public:
    EntropyTop(int32_t n, double theta) : n_(n), theta_(theta) {
        require_top(n, "the entropy gate's top");
        require_nats(theta, "the entropy gate's theta");
    }
    bool defers(const Evidence & evidence) const override {
        return evidence.target.top_entropy(std::min(n_, evidence.target.n_top)) >= theta_;
    }
    int32_t n_top() const override { return n_; }
    bool reports_top_entropy() const override { return true; }

  private:
    int32_t n_;
    double theta_;
};

// h = H / ln V of the whole row: the FLy paper (arXiv 2511.22972), Eq. 5-6.
class EntropyNormalized : public Gate {
  public:
    explicit EntropyNormalized(double theta) : theta_(theta) {
        require_share(theta, "the normalised entropy gate's theta");
    }
    bool defers(const Evidence & evidence) const override {
        // One token has nothing to be uncertain about.
        const double most = std::log(static_cast<double>(evidence.n_vocab));
        return (evidence.n_vocab > 1 ? evidence.target.entropy / most : 0.0) >= theta_;
    }

  private:
    double theta_;
};

} // namespace

std::unique_ptr<Gate> make_entropy_top(const pyfly_gate_node & node) {
    return std::make_unique<EntropyTop>(node.n, node.threshold);
}

std::unique_ptr<Gate> make_entropy_normalized(const pyfly_gate_node & node) {
    return std::make_unique<EntropyNormalized>(node.threshold);
}

} // namespace pyfly
