// A guard: only where certain regions are written (regions.h). Of one for each region, each with the rule of its own, a
// gate that follows the text is made.

#include "rules.h"

namespace pyfly {

namespace {

class InRegion : public Rule {
  public:
    explicit InRegion(int32_t regions) : regions_(regions) {
        require(regions >= 0 && regions < 1 << PYFLY_N_REGIONS, "the regions of a gate must be bits in 0..31");
    }
    bool defers(const Evidence & evidence) const override { return (regions_ >> evidence.region & 1) != 0; }
    bool looks_at_region() const override { return true; }

  private:
    int32_t regions_; // a bit each
};

} // namespace

std::unique_ptr<Rule> make_in_region(const pyfly_gate_node & node) {
    return std::make_unique<InRegion>(node.n);
}

} // namespace pyfly
