// Only the target's own choices are kept: standard speculative decoding.

#include "rules.h"

namespace pyfly {

namespace {

class Exact : public Rule {
  public:
    bool defers(const Evidence &) const override { return false; }
};

} // namespace

std::unique_ptr<Rule> make_exact(const pyfly_gate_node &) {
    return std::make_unique<Exact>();
}

} // namespace pyfly
