"""Rules, or gates: what may happen to a draft token that is not the target's choice.

A gate looks at the target's row at a mismatch and says *strict* (reject now) or *defer* (let the window decide). All
logarithms are natural; p = softmax(row) over the whole vocabulary, after everything that forbids or reweighs tokens
(grammar, logit bias, logits processors, penalties) and before temperature and truncation.

Gates are frozen dataclasses; they hold configuration, the decisions are made in `csrc/gates.cpp`. On the command line
and in presets a gate is written as in `str(gate)`: `exact`, `entropy:0.3`, `entropy-normalized:0.3`, `margin:0.3`,
`all(entropy:0.3,margin:0.5)`. `FORMS`, at the end, is the table that everything which reads, lists or explains them
looks into. A gate brings its own window, which applies where none is given.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyfly_cpp.windows import Window

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


class Gate:
    """The base of all gates."""

    def nodes(self) -> tuple[GateNode, ...]:
        """The gate in reverse Polish order."""
        raise NotImplementedError

    @property
    def window(self) -> Window:
        """The gate's own window: what a mismatch that it defers needs to stand, where nobody says otherwise."""
        return Window()

    @property
    def is_lossless(self) -> bool:
        """Whether it never defers, by its kind."""
        return False


@dataclass(frozen=True)
class Exact(Gate):
    """Never defers: only the target's own choices are kept. Lossless; standard speculative decoding."""

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode(EXACT, 0, 0.0),)

    @property
    def is_lossless(self) -> bool:
        return True

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Entropy(Gate):
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
        if self.top is None:
            return (GateNode(ENTROPY_NORMALIZED, 0, self.theta),)
        return (GateNode(ENTROPY_TOP, self.top, self.theta),)

    def __str__(self) -> str:
        if self.top is None:
            return f"entropy-normalized:{_written(self.theta)}"
        return f"entropy:{_written(self.theta)}" + ("" if self.top == 3 else f":{self.top}")


@dataclass(frozen=True)
class Margin(Gate):
    """Defers where the draft token is almost as likely as the target's favourite: ln p(top 1) - ln p(draft) < tau.

    Source: the llama.cpp variant of FLy. tau = 0 is exact matching.
    """

    tau: float = 0.3
    """Threshold in nats, >= 0: 0.3 lets a token pass that has over 74 % (exp -0.3) of the favourite's probability."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", _threshold("tau", self.tau))

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode(MARGIN, 0, self.tau),)

    @property
    def window(self) -> Window:
        """As in the llama.cpp variant: it gains with short drafts, in whose rounds `agree` cannot hold."""
        return Window(rule="reconverge")

    def __str__(self) -> str:
        return f"margin:{_written(self.tau)}"


@dataclass(frozen=True, init=False, repr=False)
class _Combined(Gate):
    """Several gates as one."""

    gates: tuple[Gate, ...]

    def __init__(self, *gates: Gate) -> None:
        if not gates:
            raise ValueError(f"{type(self).__name__} needs at least one gate.")
        for gate in gates:
            if not isinstance(gate, Gate):
                raise ValueError(f"{type(self).__name__} combines gates such as Margin(0.3), not {gate!r}.")
        object.__setattr__(self, "gates", gates)

    def _combined(self, kind: int) -> tuple[GateNode, ...]:
        operands = [node for gate in self.gates for node in gate.nodes()]
        return (*operands, GateNode(kind, len(self.gates), 0.0))

    def _windows(self) -> list[Window]:
        """Those of the gates that may defer, the one that asks for least first."""
        windows = [gate.window for gate in self.gates if not gate.is_lossless]
        return sorted(windows, key=lambda window: window.n_strict) or [Window()]

    def _join(self, word: str) -> str:
        return f"{word}({','.join(str(gate) for gate in self.gates)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(gate) for gate in self.gates)})"


@dataclass(frozen=True, init=False, repr=False)
class AllOf(_Combined):
    """Defers when every one of its gates does: `AllOf(Entropy(0.3), Margin(0.5))`."""

    def nodes(self) -> tuple[GateNode, ...]:
        return self._combined(ALL)

    @property
    def window(self) -> Window:
        """Of its gates' windows the one with the fewest strict positions: what it defers, that gate defers, too."""
        return self._windows()[0]

    @property
    def is_lossless(self) -> bool:
        return any(gate.is_lossless for gate in self.gates)

    def __str__(self) -> str:
        return self._join("all")


@dataclass(frozen=True, init=False, repr=False)
class AnyOf(_Combined):
    """Defers when at least one of its gates does: `AnyOf(Entropy(0.6), Margin(0.2))`."""

    def nodes(self) -> tuple[GateNode, ...]:
        return self._combined(ANY)

    @property
    def window(self) -> Window:
        """Of its gates' windows the one with the most strict positions: any of its gates may have deferred alone."""
        return self._windows()[-1]

    @property
    def is_lossless(self) -> bool:
        return all(gate.is_lossless for gate in self.gates)

    def __str__(self) -> str:
        return self._join("any")


class Form(NamedTuple):
    """One way to write a gate: `word:number:...`, or `word(gate,...)`."""

    word: str
    example: str
    rule: type[Gate]
    numbers: tuple[Callable[[str], float], ...] | None = ()
    """What reads the numbers behind the word, each of which may be left out from the end on; None: gates in
    parentheses."""
    fixed: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """Fields that the word says."""


FORMS = (
    Form("exact", "exact", Exact),
    Form("margin", "margin:0.3", Margin, (float,)),
    Form("entropy", "entropy:0.3", Entropy, (float, int)),
    Form("entropy-normalized", "entropy-normalized:0.3", Entropy, (float,), {"top": None}),
    Form("all", "all(...,...)", AllOf, None),
    Form("any", "any(...,...)", AnyOf, None),
)
"""Every way to write a gate. A new rule is a dataclass above, and its words here."""

THRESHOLDS = tuple(form.word for form in FORMS if form.numbers)
"""The words of gates with a threshold."""


def examples(last: str = "or", combined: bool = True) -> str:
    """How gates are written, for people: `exact, margin:0.3, ... or any(...,...)`."""
    texts = [form.example for form in FORMS if combined or form.numbers is not None]
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def require_gate(gate: object) -> Gate:
    """Returns `gate` if it is one (a gate object or its written form); raises ValueError otherwise."""
    if isinstance(gate, str):
        return parse_gate(gate)
    if not isinstance(gate, Gate):
        *kinds, last = dict.fromkeys(f"{form.rule.__name__}({'' if form.numbers == () else '...'})" for form in FORMS)
        raise ValueError(f"gate must be {', '.join(kinds)} or {last}, not {gate!r}.")
    return gate


def parse_gate(text: str) -> Gate:
    """Reads a gate as it is written on the command line and in presets; raises ValueError with the forms it knows."""
    return _parse(text, MAX_DEPTH)


def _parse(text: str, n_levels: int) -> Gate:
    text = text.strip()
    name, *numbers = text.split(":")
    for form in FORMS:
        if form.numbers is None:
            if text.startswith(form.word + "(") and text.endswith(")"):
                if n_levels == 0:
                    raise ValueError(f"the gate is nested more than {MAX_DEPTH} deep; combine fewer.")
                return form.rule(*(_parse(part, n_levels - 1) for part in _split(text[len(form.word) + 1 : -1])))
        elif name == form.word and len(numbers) <= len(form.numbers):
            try:
                return form.rule(*(read(number) for read, number in zip(form.numbers, numbers)), **form.fixed)
            except ValueError as error:
                raise ValueError(f"cannot read the gate {text!r}: {error}") from None
    near = difflib.get_close_matches(name, [form.word for form in FORMS], n=1)
    hint = f" Did you mean {near[0]!r}?" if near and near[0] != name else ""
    raise ValueError(f"unknown gate {text!r}.{hint} A gate is written {examples()}.")


def _split(text: str) -> list[str]:
    """Splits at the commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def why_strict(gate: Gate, window: Window, draft_max: int) -> str | None:
    """Why rounds of at most `draft_max` drafts can never hold a loose accept, and what to change, in one sentence. None
    where one can be, and where none is wanted: with a lossless gate, or without drafts."""
    n, k = window.n_strict, draft_max
    if gate.is_lossless or k < 1 or n < k:
        return None
    drafts = "1 draft" if k == 1 else f"{k} drafts"
    strict = "the last position of a round is" if n == 1 else f"the last {n} positions of a round are"
    change = f"draft at least {n + 1} tokens a round"
    if n == window.tail:
        change += f" or lower the window's tail to {k - 1}"
    else:
        shorter = f"a window of at most {k - 1} or one" if k > 1 else "a window"
        change += f", or choose {shorter} across rounds, such as {Margin().window}"
    return (
        f"the gate {gate} with the window {window} never accepts anything loosely, because {strict} strict and a round "
        f"has at most {drafts}; {change}."
    )
