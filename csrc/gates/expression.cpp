#include "expression.h"

#include <algorithm>
#include <iterator>

#include "kinds.h"

namespace pyfly {

GateExpression GateExpression::exact() {
    const pyfly_gate_node node = {PYFLY_GATE_EXACT, 0, 0.0, 0.0};
    return {&node, 1};
}

GateExpression::GateExpression(const pyfly_gate_node * nodes, size_t n_nodes) {
    size_t depth = 0;
    for (const pyfly_gate_node * node = nodes; node != nodes + n_nodes; node++) {
        if (node->kind == PYFLY_GATE_ALL || node->kind == PYFLY_GATE_ANY) {
            require(node->n >= 1 && static_cast<size_t>(node->n) <= depth,
                    "a gate that combines others needs at least one operand");
            depth -= static_cast<size_t>(node->n) - 1;
            nodes_.push_back({node->kind, node->n, nullptr});
            continue;
        }
        const auto known = std::find_if(std::begin(gate_kinds), std::end(gate_kinds),
                                        [&](const GateKind & k) { return k.kind == node->kind; });
        require(known != std::end(gate_kinds), "unknown gate kind " + std::to_string(node->kind));
        nodes_.push_back({node->kind, 0, known->make(*node)});
        const Gate & gate = *nodes_.back().gate;
        n_top_ = std::max(n_top_, gate.n_top());
        n_top_entropy_ = std::max(n_top_entropy_, gate.reports_top_entropy() ? gate.n_top() : 0);
        needs_draft_rows_ = needs_draft_rows_ || gate.needs_draft_row();
        draws_ = draws_ || gate.draws();
        looks_at_answer_ = looks_at_answer_ || gate.looks_at_answer();
        depth++;
    }
    require(depth == 1, "a gate expression must leave exactly one verdict");
}

void GateExpression::require_window(const pyfly_window_config & window) const {
    require(!draws_ || (window.size == 0 && window.tail <= 0),
            "speculative sampling decides about a draft at once; leave the window at None, or its size at 0");
}

bool GateExpression::defers(const Evidence & evidence) const {
    std::vector<bool> stack;
    for (const Node & node : nodes_) {
        if (node.gate) {
            stack.push_back(node.gate->defers(evidence));
            continue;
        }
        const bool is_any = node.kind == PYFLY_GATE_ANY;
        bool result = !is_any;
        for (int32_t i = 0; i < node.n; i++) {
            result = is_any ? result || stack.back() : result && stack.back();
            stack.pop_back();
        }
        stack.push_back(result);
    }
    return stack.back();
}

} // namespace pyfly
