// Speculative sampling: drafts and choices are drawn (speculative.h), and nothing is deferred. Together with a gate
// that compares distributions, in an ANY, it is that gate with the residual on rejection.

#include "kinds.h"

namespace pyfly {

namespace {

class Stochastic : public Gate {
  public:
    bool defers(const Evidence &) const override { return false; }
    bool draws() const override { return true; }
};

} // namespace

std::unique_ptr<Gate> make_stochastic(const pyfly_gate_node &) {
    return std::make_unique<Stochastic>();
}

} // namespace pyfly
