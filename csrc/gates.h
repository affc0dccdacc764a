// Gates: from the target's row at a mismatch to strict (reject now) or defer (let the window decide). No llama.h.
#pragma once

#include <vector>

#include "pyfly.h"
#include "rows.h"

namespace pyfly {

enum class Verdict { strict, defer };

// What a gate may look at.
struct GateInput {
    const RowStats & target; // of the row at the mismatch, with top-n for the gate's n_top()
    size_t n_vocab;
    float draft_logit; // the drafted token's logit in that row; -inf if it is forbidden
};

// ln p(top 1) - ln p(draft), nats, >= 0.
double margin(const GateInput & input);

class Gate {
  public:
    static Gate exact();

    // Throws Error(PYFLY_STATUS_INVALID) for a malformed expression or a threshold outside its range.
    Gate(const pyfly_gate_node * nodes, size_t n_nodes);

    Verdict operator()(const GateInput & input) const;

    // Never defers: the row at a mismatch need not be measured.
    bool is_exact() const { return nodes_.size() == 1 && nodes_[0].kind == PYFLY_GATE_EXACT; }

    // Largest n of the top-n entropies in the expression, 0 if there is none.
    int32_t n_top() const { return n_top_; }

  private:
    std::vector<pyfly_gate_node> nodes_; // reverse Polish order
    int32_t n_top_ = 0;
};

} // namespace pyfly
