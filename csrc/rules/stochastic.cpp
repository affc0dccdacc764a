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
    constexpr Sampling ways[] = {Sampling::token, Sampling::block, Sampling::twice};
    require(node.n >= 0 && node.n <= 2, "speculative sampling is by token (0), by block (1) or by two draws (2)");
    return std::make_unique<Stochastic>(ways[node.n]);
}

} // namespace pyfly
