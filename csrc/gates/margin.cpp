// The drafted token is almost as likely as the target's favourite: ln p(top 1) - ln p(drafted) < tau. Source: the
// llama.cpp variant of FLy.

#include "kinds.h"

namespace pyfly {

namespace {

class Margin : public Gate {
  public:
    explicit Margin(double tau) : tau_(tau) { require_nats(tau, "the margin gate's tau"); }
    bool defers(const Evidence & evidence) const override { return evidence.margin() < tau_; }

  private:
    double tau_;
};

} // namespace

std::unique_ptr<Gate> make_margin(const pyfly_gate_node & node) {
    return std::make_unique<Margin>(node.threshold);
}

} // namespace pyfly
