// Relaxed acceptance: the drafted token is among the target's k most probable ones, and p(top 1) - p(drafted) <= delta.
// Source: TensorRT-LLM's relaxed acceptance for MTP (relaxed_topk, relaxed_delta), where it applies inside think blocks
// only. At a tie for the last place the lower token has it.

#include <algorithm>

#include "kinds.h"

namespace pyfly {

namespace {

class Relaxed : public Gate {
  public:
    Relaxed(int32_t k, double delta) : k_(k), delta_(delta) {
        require_top(k, "relaxed acceptance's k");
        require_share(delta, "relaxed acceptance's delta");
    }
    bool defers(const Evidence & evidence) const override {
        const auto begin = evidence.target.top.begin(), end = begin + std::min(k_, evidence.target.n_top);
        return std::any_of(begin, end, [&](const TokenLogit & t) { return t.token == evidence.drafted; }) &&
               evidence.p_top() - evidence.p_drafted() <= delta_;
    }
    int32_t n_top() const override { return k_; }

  private:
    int32_t k_;
    double delta_;
};

} // namespace

std::unique_ptr<Gate> make_relaxed(const pyfly_gate_node & node) {
    return std::make_unique<Relaxed>(node.n, node.threshold);
}

} // namespace pyfly
