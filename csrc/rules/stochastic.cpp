// Speculative sampling: it says how drafts and choices are drawn (speculative.h) and defers nothing. Together with a
// rule that compares distributions, in an ANY, it is that rule with the residual on rejection.

#include "rules.h"

namespace pyfly {

namespace {

class Stochastic : public Rule {
  public:
    explicit Stochastic(Sampling sampling) : sampling_(sampling) {}
    bool defers(const Evidence &) const override { return false; }
    Sampling sampling() const override { return sampling_; }

  private:
    Sampling sampling_;
};

} // namespace

std::unique_ptr<Rule> make_stochastic(const pyfly_gate_node & node) {
    require(node.n == 0 || node.n == 1, "speculative sampling is by token (0) or by block (1)");
    return std::make_unique<Stochastic>(node.n == 1 ? Sampling::block : Sampling::token);
}

} // namespace pyfly
