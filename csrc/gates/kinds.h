// All gates by the kind of their node: a new one is a file of its own, and its line here. Each makes the gate of a
// node, and throws Error(PYFLY_STATUS_INVALID) for a number outside its range.
#pragma once

#include "gate.h"

namespace pyfly {

using MakeGate = std::unique_ptr<Gate>(const pyfly_gate_node & node);

MakeGate make_exact, make_entropy_top, make_entropy_normalized, make_margin, make_typical, make_relaxed,
    make_exact_first, make_no_repeat, make_fuzzy, make_stochastic;

struct GateKind {
    int32_t kind; // pyfly_gate_kind
    MakeGate * make;
};

constexpr GateKind gate_kinds[] = {
    {PYFLY_GATE_EXACT, make_exact},
    {PYFLY_GATE_ENTROPY_TOP, make_entropy_top},
    {PYFLY_GATE_ENTROPY_NORMALIZED, make_entropy_normalized},
    {PYFLY_GATE_MARGIN, make_margin},
    {PYFLY_GATE_TYPICAL, make_typical},
    {PYFLY_GATE_RELAXED, make_relaxed},
    {PYFLY_GATE_EXACT_FIRST, make_exact_first},
    {PYFLY_GATE_NO_REPEAT, make_no_repeat},
    {PYFLY_GATE_FUZZY_KL, make_fuzzy},
    {PYFLY_GATE_FUZZY_KL_TARGET, make_fuzzy},
    {PYFLY_GATE_FUZZY_JS, make_fuzzy},
    {PYFLY_GATE_FUZZY_JS_CODE, make_fuzzy},
    {PYFLY_GATE_FUZZY_TV, make_fuzzy},
    {PYFLY_GATE_STOCHASTIC, make_stochastic},
};

} // namespace pyfly
