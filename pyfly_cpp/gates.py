"""Gates: what may happen to a draft token that is not the target's choice.

A gate looks at the target's row at a mismatch and says *strict* (reject now) or *defer* (let the window decide). All
logarithms are natural; p = softmax(row) over the whole vocabulary, after everything that forbids or reweighs tokens
(grammar, logit bias, logits processors, penalties) and before temperature and truncation.

Gates are frozen dataclasses; they hold configuration, the decisions are made in `csrc/gates.cpp`. On the command line
and in presets a gate is written as in `str(gate)`: `exact`, `entropy:0.3`, `entropy-normalized:0.3`, `margin:0.3`,
`all(entropy:0.3,margin:0.5)`.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import NamedTuple, Union

EXACT, ENTROPY_TOP, ENTROPY_NORMALIZED, MARGIN, ALL, ANY = range(6)
"""`pyfly_gate_kind` of pyfly.h."""

MAX_TOP = 32
"""Largest n of a top-n entropy."""

MAX_DEPTH = 32
"""How deep the written form of a gate may be nested."""


class GateNode(NamedTuple):
    """One node of a gate in reverse Polish order (`pyfly_gate_node` of pyfly.h)."""

    kind: int
    n: int
    threshold: float


def _threshold(name: str, value: float, upper: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, not {value!r}.")
    if not math.isfinite(value) or not 0.0 <= value <= upper:
        allowed = "a finite number >= 0" if upper == math.inf else f"in [0, {upper:g}]"
        raise ValueError(f"{name} must be {allowed}, not {value!r}.")
    return float(value)


def _written(x: float) -> str:
    """The shortest form that reads back as x."""
    return repr(x)[:-2] if repr(x).endswith(".0") else repr(x)


@dataclass(frozen=True)
class Exact:
    """Never defers: only the target's own choices are kept. Lossless; standard speculative decoding."""

    def nodes(self) -> tuple[GateNode, ...]:
        """The gate in reverse Polish order."""
        return (GateNode(EXACT, 0, 0.0),)

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Entropy:
    """Defers where the target is undecided.

    With `top=n`: H_n = -sum over the n most probable tokens of p ln p (not renormalised, nats) >= theta. Source: the
    FLy reference code (AMD-AGI/FLy, `fly/models/FLy.py`), with n = 3.

    With `top=None`: h = -sum p ln p / ln V >= theta, h in [0, 1]. Source: the FLy paper (arXiv 2511.22972), Eq. 5-6.

    The two differ: 0.3 nats of top-3 entropy is a loose gate; 0.3 of the normalised entropy asks for 3.5 nats at a
    vocabulary of 128k and is nearly always strict. A theta for one does not carry over to the other.
    """

    theta: float = 0.3
    """Threshold: nats >= 0 with `top=n`, in [0, 1] with `top=None`. 0 defers everything."""

    top: int | None = 3
    """n of the top-n entropy, 1..32, or None for the normalised entropy of the whole row."""

    def __post_init__(self) -> None:
        if self.top is not None and (
            isinstance(self.top, bool) or not isinstance(self.top, int) or not 1 <= self.top <= MAX_TOP
        ):
            raise ValueError(
                f"top must be an integer in 1..{MAX_TOP}, or None for the normalised entropy, not {self.top!r}."
            )
        object.__setattr__(self, "theta", _threshold("theta", self.theta, 1.0 if self.top is None else math.inf))

    def nodes(self) -> tuple[GateNode, ...]:
        """The gate in reverse Polish order."""
        if self.top is None:
            return (GateNode(ENTROPY_NORMALIZED, 0, self.theta),)
        return (GateNode(ENTROPY_TOP, self.top, self.theta),)

    def __str__(self) -> str:
        if self.top is None:
            return f"entropy-normalized:{_written(self.theta)}"
        return f"entropy:{_written(self.theta)}" + ("" if self.top == 3 else f":{self.top}")


@dataclass(frozen=True)
class Margin:
    """Defers where the draft token is almost as likely as the target's favourite: ln p(top 1) - ln p(draft) < tau.

    Source: the llama.cpp variant of FLy. tau = 0 is exact matching.
    """

    tau: float = 0.3
    """Threshold in nats, >= 0: 0.3 lets a token pass that has over 74 % (exp -0.3) of the favourite's probability."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", _threshold("tau", self.tau))

    def nodes(self) -> tuple[GateNode, ...]:
        """The gate in reverse Polish order."""
        return (GateNode(MARGIN, 0, self.tau),)

    def __str__(self) -> str:
        return f"margin:{_written(self.tau)}"


class _Combined:
    """Several gates as one."""

    _kind: int
    _name: str
    gates: tuple[Gate, ...]

    def __init__(self, *gates: Gate) -> None:
        if not gates:
            raise ValueError(f"{type(self).__name__} needs at least one gate.")
        for gate in gates:
            require_gate(gate)
        self.gates = gates

    def nodes(self) -> tuple[GateNode, ...]:
        """The gate in reverse Polish order."""
        operands = [node for gate in self.gates for node in gate.nodes()]
        return (*operands, GateNode(self._kind, len(self.gates), 0.0))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.nodes() == getattr(other, "nodes", tuple)()

    def __hash__(self) -> int:
        return hash((type(self), self.nodes()))

    def __str__(self) -> str:
        return f"{self._name}({','.join(str(gate) for gate in self.gates)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(gate) for gate in self.gates)})"


class All(_Combined):
    """Defers when every one of its gates does: `All(Entropy(0.3), Margin(0.5))`."""

    _kind = ALL
    _name = "all"


class Any(_Combined):
    """Defers when at least one of its gates does: `Any(Entropy(0.6), Margin(0.2))`."""

    _kind = ANY
    _name = "any"


Gate = Union[Exact, Entropy, Margin, All, Any]


def require_gate(gate: object) -> Gate:
    """Returns `gate` if it is one (a gate object or its written form); raises ValueError otherwise."""
    if isinstance(gate, str):
        return parse_gate(gate)
    if not isinstance(gate, (Exact, Entropy, Margin, All, Any)):
        raise ValueError(f"gate must be Exact(), Entropy(...), Margin(...), All(...) or Any(...), not {gate!r}.")
    return gate


def parse_gate(text: str) -> Gate:
    """Reads a gate as it is written on the command line and in presets; raises ValueError with the forms it knows."""
    return _parse(text, MAX_DEPTH)


def _parse(text: str, n_levels: int) -> Gate:
    text = text.strip()
    for name, combined in (("all", All), ("any", Any)):
        if text.startswith(name + "(") and text.endswith(")"):
            if n_levels == 0:
                raise ValueError(f"the gate is nested more than {MAX_DEPTH} deep; combine fewer.")
            return combined(*(_parse(part, n_levels - 1) for part in _split(text[len(name) + 1 : -1])))
    name, *numbers = text.split(":")
    try:
        if name == "exact" and not numbers:
            return Exact()
        if name == "margin" and len(numbers) <= 1:
            return Margin(float(numbers[0]) if numbers else 0.3)
        if name == "entropy-normalized" and len(numbers) <= 1:
            return Entropy(float(numbers[0]) if numbers else 0.3, top=None)
        if name == "entropy" and len(numbers) <= 2:
            return Entropy(float(numbers[0]) if numbers else 0.3, top=int(numbers[1]) if len(numbers) == 2 else 3)
    except ValueError as error:
        raise ValueError(f"cannot read the gate {text!r}: {error}") from None
    near = difflib.get_close_matches(name, ["exact", "margin", "entropy", "entropy-normalized", "all", "any"], n=1)
    hint = f" Did you mean {near[0]!r}?" if near and near[0] != name else ""
    raise ValueError(
        f"unknown gate {text!r}.{hint} A gate is written exact, margin:0.3, entropy:0.3, entropy-normalized:0.3, "
        "all(...,...) or any(...,...)."
    )


def _split(text: str) -> list[str]:
    """Splits at the commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
