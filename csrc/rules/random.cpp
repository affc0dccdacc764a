// A baseline for measurements, not a rule to write with: a drafted token is deferred with probability p, whatever the
// rows say. What looks at rows must be worth more than this at the same number of loose tokens.

#include <algorithm>

#include "random.h"
#include "rules.h"

namespace pyfly {

namespace {

// Its number follows from the seed, the answer so far and the drafted token, and from nothing else: not from earlier
// drafts, rollbacks or other texts of the batch. A greedy request has no seed of its own.
class RandomAcceptance : public Rule {
  public:
    RandomAcceptance(int32_t seed, double p) : seed_(seed), p_(p) {
        require(seed >= 0, "the seed of random acceptance must be >= 0");
        require_share(p, "random acceptance's p");
    }

    // Takes time linear in the answer.
    bool defers(const Evidence & evidence) const override {
        uint64_t state = static_cast<uint64_t>(seed_);
        std::for_each(evidence.answered, evidence.answered + evidence.n_answered,
                      [&](int32_t token) { state = absorbed(state, token); });
        return Random(absorbed(state, evidence.drafted)).uniform() < p_;
    }
    bool looks_at_answer() const override { return true; }

  private:
    // A step of FNV-1a, by tokens.
    static uint64_t absorbed(uint64_t state, int32_t token) {
        return (state ^ static_cast<uint32_t>(token)) * 0x100000001B3U;
    }

    int32_t seed_;
    double p_;
};

} // namespace

std::unique_ptr<Rule> make_random(const pyfly_gate_node & node) {
    return std::make_unique<RandomAcceptance>(node.n, node.threshold);
}

} // namespace pyfly
