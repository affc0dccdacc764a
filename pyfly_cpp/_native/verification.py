"""What needs no model: verification of one step on arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pyfly_cpp._native.boundary import check, float_pointer, floats, token_pointer, tokens
from pyfly_cpp._native.library import GATE_KINDS, WINDOW_RULES, ffi, lib

GateNodes = Sequence[tuple[str, int, float, float]]
"""(word of GATE_KINDS, n, threshold, second) of a gate's nodes in reverse Polish order: `pyfly_gate_node` of
pyfly.h."""

WindowConfig = tuple[int, str, int, bool]
"""(size, word of WINDOW_RULES, tail or -1, across_steps): `pyfly_window_config` of pyfly.h."""


class RawDecision(NamedTuple):
    """`pyfly_decision` of pyfly.h."""

    reason: int
    choice: int
    entropy: float
    margin: float


def verify(
    logits: Any,
    draft: Any,
    draft_logits: Any | None,
    gate: GateNodes,
    window: WindowConfig,
    protected: Iterable[int],
    eog: Iterable[int],
    target_tokens: Any | None,
    answered: Any | None,
    n_answered: int,
    seed: int,
) -> tuple[list[RawDecision], list[int]]:
    """One step, see `pyfly_cpp.verify`: the decision on every drafted position, and the emitted tokens."""
    draft_array = tokens("draft", draft)
    n_draft = draft_array.shape[0]
    rows = floats("logits", logits, (n_draft + 1, None))
    protected_array, eog_array = tokens("protected", sorted(protected)), tokens("eog", sorted(eog))
    choices = None if target_tokens is None else tokens("target_tokens", target_tokens, n_draft + 1)
    draft_rows = None if draft_logits is None else floats("draft_logits", draft_logits, (n_draft, rows.shape[1]))
    before = None if answered is None else tokens("answered", answered)
    n_before = n_answered if before is None else before.shape[0]
    decisions = ffi.new("pyfly_decision[]", max(n_draft, 1))
    emitted = ffi.new("int32_t[]", n_draft + 1)
    n_emitted = ffi.new("size_t *")
    check(
        lib.pyfly_verify, float_pointer(rows), rows.shape[1], token_pointer(draft_array), n_draft,
        ffi.NULL if draft_rows is None else float_pointer(draft_rows),
        ffi.NULL if choices is None else token_pointer(choices), gate_array(gate), len(gate),
        ffi.new("pyfly_window_config *", window_fields(window)),
        token_pointer(protected_array), protected_array.shape[0], token_pointer(eog_array), eog_array.shape[0],
        ffi.NULL if before is None else token_pointer(before), n_before, seed,
        decisions, emitted, n_emitted,
    )  # fmt: skip
    judged = [RawDecision(d.reason, d.choice, d.entropy, d.margin) for d in decisions[0:n_draft]]
    return judged, list(emitted[0 : n_emitted[0]])


def gate_array(gate: GateNodes) -> Any:
    """A gate as C takes it; to be kept while C uses it."""
    return ffi.new("pyfly_gate_node[]", [(GATE_KINDS[kind], *numbers) for kind, *numbers in gate])


def window_fields(window: WindowConfig) -> tuple[int, int, int, bool]:
    """A window as C takes it."""
    size, rule, tail, across_steps = window
    return size, WINDOW_RULES[rule], tail, across_steps
