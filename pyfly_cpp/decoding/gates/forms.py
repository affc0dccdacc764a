"""The written form of gates: how each is written, the table of all, and what reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pyfly_cpp.decoding.gates.at_once import Relaxed, Typical
from pyfly_cpp.decoding.gates.combined import AllOf, AnyOf
from pyfly_cpp.decoding.gates.fly import Entropy, Exact, Margin
from pyfly_cpp.decoding.gates.fuzzy import KINDS, Fuzzy
from pyfly_cpp.decoding.gates.gate import Gate, written
from pyfly_cpp.decoding.gates.guards import ExactFirst, Guard, NoRepeat
from pyfly_cpp.decoding.gates.stochastic import Stochastic
from pyfly_cpp.decoding.windows import Window
from pyfly_cpp.errors import did_you_mean

MAX_DEPTH = 32
"""How deep the written form of a gate may be nested."""


class Form(NamedTuple):
    """One way to write a gate: `word:number:...` or `word(gate,...)`."""

    word: str
    example: str
    """For people; empty: one of its kind is enough for them."""
    gate: type[Gate]
    numbers: dict[str, Callable[[str], float]] | None = {}  # noqa: RUF012 - never changed
    """The fields of the numbers behind the word, each of which may be left out from the end on, and what reads them;
    None: gates in parentheses."""
    fixed: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """Fields that the word sets."""

    @property
    def threshold(self) -> str | None:
        """The field of its threshold, the first number that is no count; None if it has none."""
        return next((field for field, read in (self.numbers or {}).items() if read is float), None)


def _fuzzy(kind: str, residual: bool = False, example: str = "") -> Form:
    """Fuzzy decoding by a divergence; with the residual, its threshold 0 is `Stochastic`."""
    word = f"{'rfsd' if residual else 'fuzzy'}-{kind}"
    fixed = {"kind": kind, "residual": True} if residual else {"kind": kind}
    return Form(word, example, Fuzzy, {"threshold": float, "top": int}, fixed)


FORMS = (
    Form("exact", "exact", Exact),
    Form("margin", "margin:0.3", Margin, {"tau": float}),
    Form("entropy", "entropy:0.3", Entropy, {"theta": float, "top": int}),
    Form("typical", "typical:0.09:0.3", Typical, {"epsilon": float, "delta": float}),
    Form("relaxed", "relaxed:10:0.6", Relaxed, {"k": int, "delta": float}),
    Form("entropy-normalized", "entropy-normalized:0.3", Entropy, {"theta": float}, {"top": None}),
    _fuzzy("js", example="fuzzy-js:0.1"),
    *(_fuzzy(kind) for kind in KINDS if kind != "js"),
    _fuzzy("js", residual=True, example="rfsd-js:0.1"),
    *(_fuzzy(kind, residual=True) for kind in KINDS if kind != "js"),
    Form("stochastic", "stochastic", Stochastic),
    Form("exact-first", "exact-first:8", ExactFirst, {"n": int}),
    Form("no-repeat", "no-repeat:8", NoRepeat, {"n": int}),
    Form("all", "all(...,...)", AllOf, None),
    Form("any", "any(...,...)", AnyOf, None),
)  # fmt: skip
"""Every way to write a gate. A new gate is a dataclass in a file next to this one, and its words here."""


def at_thresholds(word: str, thresholds: Sequence[float]) -> list[Gate]:
    """The gate of a word with each of these thresholds; raises ValueError if it has none, or if one is out of range."""
    for form in FORMS:
        if form.word == word and (field := form.threshold):
            return [form.gate(**form.fixed, **{field: threshold}) for threshold in thresholds]
    known = [form.word for form in FORMS if form.threshold]
    raise ValueError(
        f"{word!r} is not a gate with a threshold.{did_you_mean(word, known)} They are {', '.join(known)}."
    )


def examples(last: str = "or", combined: bool = True) -> str:
    """How gates that can stand alone are written, for people: `exact, margin:0.3, ... or any(...,...)`."""
    forms = (form for form in FORMS if not issubclass(form.gate, Guard))
    texts = [form.example for form in forms if form.example and (combined or form.numbers is not None)]
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def require_gate(gate: object) -> Gate:
    """Returns `gate` if it can decide alone (a gate object or its written form); raises ValueError otherwise."""
    if isinstance(gate, str):
        return parse_gate(gate)
    if isinstance(gate, Gate):
        return _require_not_a_guard(gate)
    *kinds, last = dict.fromkeys(f"{form.gate.__name__}({'' if form.numbers == {} else '...'})" for form in FORMS)
    raise ValueError(f"gate must be {', '.join(kinds)} or {last}, not {gate!r}.")


def parse_gate(text: str) -> Gate:
    """Reads a gate as it is written on the command line and in presets; raises ValueError with the forms it knows."""
    return _require_not_a_guard(_parse(text, MAX_DEPTH))


def _require_not_a_guard(gate: Gate) -> Gate:
    if gate.is_guard:
        raise ValueError(f"{gate} only restricts other gates; combine it with one, as in all({Margin()},{gate}).")
    return gate


def _parse(text: str, n_levels: int) -> Gate:
    text = text.strip()
    name, *numbers = text.split(":")
    for form in FORMS:
        if form.numbers is None:
            if text.startswith(form.word + "(") and text.endswith(")"):
                if n_levels == 0:
                    raise ValueError(f"the gate is nested more than {MAX_DEPTH} deep; combine fewer.")
                parts = _split(text[len(form.word) + 1 : -1])
                return form.gate(*(_parse(part, n_levels - 1) for part in parts))
        elif name == form.word and len(numbers) <= len(form.numbers):
            try:
                given = {field: read(number) for (field, read), number in zip(form.numbers.items(), numbers)}
                return form.gate(**given, **form.fixed)
            except ValueError as error:
                raise ValueError(f"cannot read the gate {text!r}: {error}") from None
    words = [form.word for form in FORMS]
    hint = "" if name in words else did_you_mean(name, words)
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


def require_window_for(gate: Gate, window: Window | None) -> Window | None:
    """Returns `window` if the gate has a use for it, or None; raises ValueError otherwise."""
    if gate.draws and window is not None and window.n_strict + window.size > 0:
        raise ValueError(
            f"the gate {gate} decides immediately and has no use for the window {window}; leave it at None."
        )
    return window


def why_strict(gate: Gate, window: Window, draft_max: int) -> str | None:
    """Why steps of at most `draft_max` drafts can never hold a loose accept, and what to change, in one sentence. None
    if one can be, and if none is wanted: with a lossless gate, or without drafts."""
    n, k = window.n_strict, draft_max
    if gate.is_lossless or k < 1 or n < k:
        return None
    drafts = "1 draft" if k == 1 else f"{k} drafts"
    strict = "the last position of a step is" if n == 1 else f"the last {n} positions of a step are"
    change = f"draft at least {n + 1} tokens per step"
    if n == window.tail:
        change += f" or lower the window's tail to {k - 1}"
    else:
        shorter = f"a window of at most {k - 1} or one" if k > 1 else "a window"
        change += f", or choose {shorter} across steps, such as {Window(rule='reconverge')}"
    return (
        f"the gate {gate} with the window {window} never accepts anything loosely, because {strict} strict and a step "
        f"has at most {drafts}; {change}."
    )


_MOST = {"fuzzy_js": math.log(2), "fuzzy_tv": 1.0}
"""A bound of divergences."""


def why_all(gate: Gate, draft_max: int) -> str | None:
    """Why a threshold of the gate lets every draft pass, and what to change, in one sentence. None if it does not,
    and without drafts."""
    for node in gate.nodes() if draft_max > 0 else ():
        most = _MOST.get(node.kind, math.inf)
        if node.threshold >= most:
            word, threshold = node.kind.replace("_", "-"), written(node.threshold)
            meant = f", or write {word}-code:{threshold} for the scale of the FSD code" if most < 1 else ""
            return (
                f"the threshold {threshold} of {word} in the gate {gate} lets every draft pass, because this "
                f"divergence is at most {most:.3g}; lower it{meant}."
            )
    return None


_ADVISED_MARGIN = 0.3
"""The largest margin, in nats, that the gate's author advises. At it we lost 5 points of accuracy (docs/answers.md)."""


def why_beyond(gate: Gate, draft_max: int) -> str | None:
    """Why the margin of a gate that has nothing else to decide by is larger than advised, in one sentence. None if it
    is not, and without drafts."""
    nodes = gate.nodes() if draft_max > 0 else ()
    if len(nodes) != 1 or nodes[0].kind != "margin" or nodes[0].threshold <= _ADVISED_MARGIN:
        return None
    share = 100 * math.exp(-nodes[0].threshold)
    return (
        f"the gate {gate} accepts tokens down to {share:.2g}% as likely as the model's own choice; the gate's author "
        f"advises a margin of at most {written(_ADVISED_MARGIN)}, and `pyfly-cpp eval` measures the accuracy that this "
        "costs."
    )
