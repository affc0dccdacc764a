// A guard: no loose accept is the last of n tokens that stand in the answer already. So looseness does not keep a text
// in a loop that the target would leave; what the target repeats itself stands. Like no_repeat_ngram_size of other
// programs, but for loose accepts alone.

#include <algorithm>

#include "kinds.h"

namespace pyfly {

namespace {

class NoRepeat : public Gate {
  public:
    explicit NoRepeat(int32_t n) : n_before_(static_cast<int64_t>(n) - 1) {
        require(n >= 1, "the number of tokens that must not come again must be >= 1");
    }

    // Takes time linear in the answer, at worst (where it repeats itself) times n.
    bool defers(const Evidence & evidence) const override {
        const int32_t * begin = evidence.answered;
        const int32_t * end = begin + evidence.n_answered;
        if (evidence.n_answered <= n_before_) {
            return true;
        }
        for (const int32_t * last = begin + n_before_; last != end; last++) {
            if (*last == evidence.drafted && std::equal(last - n_before_, last, end - n_before_)) {
                return false;
            }
        }
        return true;
    }
    bool looks_at_answer() const override { return true; }

  private:
    int64_t n_before_; // tokens of those before the drafted one
};

} // namespace

std::unique_ptr<Gate> make_no_repeat(const pyfly_gate_node & node) {
    return std::make_unique<NoRepeat>(node.n);
}

} // namespace pyfly
