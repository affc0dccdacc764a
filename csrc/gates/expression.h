// The gate of a request: one, or several that are combined. From the evidence at a mismatch to strict (reject now) or
// defer (let the window decide). No llama.h.
#pragma once

#include <vector>

#include "gate.h"

namespace pyfly {

class GateExpression {
  public:
    static GateExpression exact();

    // Throws Error(PYFLY_STATUS_INVALID) for a malformed expression or a number outside its range.
    GateExpression(const pyfly_gate_node * nodes, size_t n_nodes);

    bool defers(const Evidence & evidence) const;

    // Never defers: the row at a mismatch need not be measured.
    bool is_exact() const {
        return nodes_.size() == 1 && (nodes_[0].kind == PYFLY_GATE_EXACT || nodes_[0].kind == PYFLY_GATE_STOCHASTIC);
    }

    // Whether drafts and the target's choices are drawn by speculative sampling: if one of its gates does.
    bool draws() const { return draws_; }

    // Throws Error(PYFLY_STATUS_INVALID) for a window that it has no use for.
    void require_window(const pyfly_window_config & window) const;

    // Most probable tokens that its gates look at, and how many of them the entropy that is reported counts; 0: the
    // whole row.
    int32_t n_top() const { return n_top_; }
    int32_t n_top_entropy() const { return n_top_entropy_; }

    // Whether one of its gates looks at the drafter's rows.
    bool needs_draft_rows() const { return needs_draft_rows_; }

    bool looks_at_answer() const { return looks_at_answer_; }

  private:
    struct Node {
        int32_t kind;
        int32_t n;                        // operands
        std::shared_ptr<const Gate> gate; // null: it combines the operands before it
    };

    std::vector<Node> nodes_; // reverse Polish order
    int32_t n_top_ = 0, n_top_entropy_ = 0;
    bool needs_draft_rows_ = false, looks_at_answer_ = false, draws_ = false;
};

} // namespace pyfly
