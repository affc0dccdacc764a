// A guard: the first n tokens of an answer are the target's own. What is wrong there is wrong in all that follows
// (arXiv 2610.08678).

#include "kinds.h"

namespace pyfly {

namespace {

class ExactFirst : public Gate {
  public:
    explicit ExactFirst(int32_t n) : n_(n) { require(n >= 0, "the number of exact first tokens must be >= 0"); }
    bool defers(const Evidence & evidence) const override { return evidence.n_answered >= n_; }

  private:
    int32_t n_;
};

} // namespace

std::unique_ptr<Gate> make_exact_first(const pyfly_gate_node & node) {
    return std::make_unique<ExactFirst>(node.n);
}

} // namespace pyfly
