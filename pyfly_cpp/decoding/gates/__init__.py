"""Gates: the rules for draft tokens that are not the target's choice.

A gate looks at the target's row at a mismatch and decides: *strict* (reject now) or *defer* (let the window decide).
All logarithms are natural; p = softmax(row) over the whole vocabulary, after everything that forbids or reweighs tokens
(grammar, logit bias, logits processors, penalties) and before temperature and truncation.

Gates are frozen dataclasses; they hold configuration, the decisions are made in `csrc/gates/`. On the command line and
in presets a gate is written as in `str(gate)`: `exact`, `entropy:0.3`, `margin:0.3`, `typical:0.09:0.3`,
`all(margin:0.5,exact-first:8)`. Guards only restrict other gates, with which they stand in an `all(...)`. `FORMS` (in
`forms.py`) is the one table for reading, listing and explaining them. A gate includes its own window, which applies
unless you set one.
"""

from __future__ import annotations

from pyfly_cpp.decoding.gates.at_once import Relaxed, Typical
from pyfly_cpp.decoding.gates.combined import AllOf, AnyOf
from pyfly_cpp.decoding.gates.fly import Entropy, Exact, Margin
from pyfly_cpp.decoding.gates.forms import (
    FORMS,
    at_thresholds,
    examples,
    parse_gate,
    require_gate,
    require_window_for,
    why_all,
    why_beyond,
    why_strict,
)
from pyfly_cpp.decoding.gates.fuzzy import Fuzzy
from pyfly_cpp.decoding.gates.gate import Gate, GateNode
from pyfly_cpp.decoding.gates.guards import ExactFirst, NoRepeat
from pyfly_cpp.decoding.gates.stochastic import Stochastic

__all__ = [
    "FORMS",
    "AllOf",
    "AnyOf",
    "Entropy",
    "Exact",
    "ExactFirst",
    "Fuzzy",
    "Gate",
    "GateNode",
    "Margin",
    "NoRepeat",
    "Relaxed",
    "Stochastic",
    "Typical",
    "at_thresholds",
    "examples",
    "parse_gate",
    "require_gate",
    "require_window_for",
    "why_all",
    "why_beyond",
    "why_strict",
]
