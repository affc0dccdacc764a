// A guard: the margins that an answer gives away, that is, how much less likely its loosely accepted tokens are than
// the target's favourites, stay under a number of nats for every 100 tokens. What is not given away is saved up.

#include "rules.h"

namespace pyfly {

namespace {

class Budget : public Rule {
  public:
    explicit Budget(double nats) : nats_(nats) { require_nats(nats, "the budget"); }
    bool defers(const Evidence & evidence) const override {
        const double allowed = nats_ / 100.0 * static_cast<double>(evidence.n_answered + 1);
        return evidence.given_away + evidence.margin() < allowed;
    }

  private:
    double nats_; // for 100 tokens
};

} // namespace

std::unique_ptr<Rule> make_budget(const pyfly_gate_node & node) {
    return std::make_unique<Budget>(node.threshold);
}

} // namespace pyfly
