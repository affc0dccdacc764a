// Only the target's own choices are kept: standard speculative decoding.

#include "kinds.h"

namespace pyfly {

namespace {

class Exact : public Gate {
  public:
    bool defers(const Evidence &) const override { return false; }
};

} // namespace

std::unique_ptr<Gate> make_exact(const pyfly_gate_node &) {
    return std::make_unique<Exact>();
}

} // namespace pyfly
