#include "gates.h"

#include <algorithm>
#include <cmath>

#include "error.h"

namespace pyfly {

namespace {

void require(bool condition, const std::string & message) {
    if (!condition) {
        throw Error(PYFLY_STATUS_INVALID, message);
    }
}

bool defers(const pyfly_gate_node & node, const GateInput & input) {
    switch (node.kind) {
        case PYFLY_GATE_ENTROPY_TOP:
            return input.target.top_entropy(std::min(node.n, input.target.n_top)) >= node.threshold;
        case PYFLY_GATE_ENTROPY_NORMALIZED:
            // Eq. 5-6: h = H / ln V. One token has nothing to be uncertain about.
            return (input.n_vocab > 1 ? input.target.entropy / std::log(static_cast<double>(input.n_vocab)) : 0.0) >=
                   node.threshold;
        case PYFLY_GATE_MARGIN:
            return margin(input) < node.threshold;
        default:
            return false; // PYFLY_GATE_EXACT
    }
}

} // namespace

double margin(const GateInput & input) {
    // The normaliser cancels: ln p(a) - ln p(b) = logit(a) - logit(b).
    return static_cast<double>(input.target.max.logit) - static_cast<double>(input.draft_logit);
}

Gate Gate::exact() {
    const pyfly_gate_node node = {PYFLY_GATE_EXACT, 0, 0.0};
    return {&node, 1};
}

Gate::Gate(const pyfly_gate_node * nodes, size_t n_nodes) : nodes_(nodes, nodes + n_nodes) {
    size_t depth = 0;
    for (const pyfly_gate_node & node : nodes_) {
        switch (node.kind) {
            case PYFLY_GATE_EXACT:
                depth++;
                break;
            case PYFLY_GATE_ENTROPY_TOP:
                require(node.n >= 1 && node.n <= max_top, "the entropy gate's top must be in 1.." +
                                                              std::to_string(max_top) + ", not " +
                                                              std::to_string(node.n));
                require(std::isfinite(node.threshold) && node.threshold >= 0.0,
                        "the entropy gate's theta must be a finite number of nats >= 0");
                n_top_ = std::max(n_top_, node.n);
                depth++;
                break;
            case PYFLY_GATE_ENTROPY_NORMALIZED:
                require(node.threshold >= 0.0 && node.threshold <= 1.0,
                        "the normalised entropy gate's theta must be in [0, 1]");
                depth++;
                break;
            case PYFLY_GATE_MARGIN:
                require(std::isfinite(node.threshold) && node.threshold >= 0.0,
                        "the margin gate's tau must be a finite number of nats >= 0");
                depth++;
                break;
            case PYFLY_GATE_ALL:
            case PYFLY_GATE_ANY:
                require(node.n >= 1 && static_cast<size_t>(node.n) <= depth,
                        "a gate that combines others needs at least one operand");
                depth -= static_cast<size_t>(node.n) - 1;
                break;
            default:
                throw Error(PYFLY_STATUS_INVALID, "unknown gate kind " + std::to_string(node.kind));
        }
    }
    require(depth == 1, "a gate expression must leave exactly one verdict");
}

Verdict Gate::operator()(const GateInput & input) const {
    std::vector<bool> stack;
    for (const pyfly_gate_node & node : nodes_) {
        if (node.kind == PYFLY_GATE_ALL || node.kind == PYFLY_GATE_ANY) {
            const bool is_any = node.kind == PYFLY_GATE_ANY;
            bool result = !is_any;
            for (int32_t i = 0; i < node.n; i++) {
                result = is_any ? result || stack.back() : result && stack.back();
                stack.pop_back();
            }
            stack.push_back(result);
        } else {
            stack.push_back(defers(node, input));
        }
    }
    return stack.back() ? Verdict::defer : Verdict::strict;
}

} // namespace pyfly
