// Typical acceptance: p(drafted) > min(epsilon, delta exp(-H)), H being the entropy of the whole row in nats. The more
// undecided the target is, the less likely a token may be. Source: Cai et al. 2024, "Medusa" (arXiv 2401.10774),
// section 2.3.1. There p has the temperature of the request; here it is 1, as for all gates.

#include <algorithm>
#include <cmath>

#include "kinds.h"

namespace pyfly {

namespace {

class Typical : public Gate {
  public:
    Typical(double epsilon, double delta) : epsilon_(epsilon), delta_(delta) {
        require_share(epsilon, "typical acceptance's epsilon");
        require_share(delta, "typical acceptance's delta");
    }
    bool defers(const Evidence & evidence) const override {
        return evidence.p_drafted() > std::min(epsilon_, delta_ * std::exp(-evidence.target.entropy));
    }

  private:
    double epsilon_, delta_;
};

} // namespace

std::unique_ptr<Gate> make_typical(const pyfly_gate_node & node) {
    return std::make_unique<Typical>(node.threshold, node.second);
}

} // namespace pyfly
