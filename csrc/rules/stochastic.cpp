// Speculative sampling: drafts and choices are drawn (speculative.h), and nothing is deferred. Together with a rule
// that compares distributions, in an ANY, it is that rule with the residual on rejection.

#include "rules.h"

namespace pyfly {

namespace {

class Stochastic : public Rule {
  public:
    bool defers(const Evidence &) const override { return false; }
    bool draws() const override { return true; }
};

} // namespace

std::unique_ptr<Rule> make_stochastic(const pyfly_gate_node &) {
    return std::make_unique<Stochastic>();
}

} // namespace pyfly
