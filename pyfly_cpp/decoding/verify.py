"""Verification of one step of drafted tokens, on numpy arrays and without a model.

The same C++ as in generation: for experiments, other runtimes, and the conformance tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy.typing as npt

from pyfly_cpp import _native
from pyfly_cpp.decoding.gates import Exact, Gate, require_gate
from pyfly_cpp.decoding.windows import Window, require_window
from pyfly_cpp.ranges import require_integer

REASONS = tuple(_native.REASONS)
"""Why a token was committed, or a draft refused, by the numbers of `PYFLY_REASON_*`."""


@dataclass(frozen=True)
class Decision:
    """How one drafted position was judged: on its own, also behind the first rejection."""

    position: int
    """0-based place in the draft."""
    match: bool
    """Whether the draft is the target's choice."""
    gate: str
    """`"match"`, `"strict"` or `"defer"`; `"safety"` if a protected or forbidden token forbids the question, or if the
    gate would take a draft token that is as good as impossible: a margin of 22.18 nats or more."""
    window: str
    """The end of a deferred mismatch: `"stands"`, `"broken"`, `"does not fit"`; `""` for other positions."""
    reason: str
    """`"match"` and `"loose"`: accepted; `"gate"`, `"window"`, `"boundary"`, `"safety"`: rejected, and why."""
    choice: int
    """The target's choice."""
    entropy: float
    """Entropy of the target's row, nats: of its top n if the gate measures that, else of the whole row."""
    margin: float
    """ln p(top 1) - ln p(draft), nats, >= 0; +inf for a forbidden draft token."""

    @property
    def accepted(self) -> bool:
        """Whether the position, taken on its own, is accepted."""
        return self.reason in ("match", "loose")


@dataclass(frozen=True)
class Verification:
    """The result of one step."""

    n_accepted: int
    """Length of the accepted prefix of the draft."""
    tokens: list[int]
    """The emitted tokens: the accepted prefix and, unless that ends the text, the target's own token (its choice at the
    rejection, or the bonus)."""
    decisions: list[Decision]
    """One for each drafted position."""


_GATE = {
    "match": "match",
    "loose": "defer",
    "gate": "strict",
    "window": "defer",
    "boundary": "defer",
    "safety": "safety",
}
_WINDOW = {"loose": "stands", "window": "broken", "boundary": "does not fit"}


def verify(
    logits: npt.ArrayLike,
    draft: npt.ArrayLike,
    gate: Gate | str = Exact(),  # noqa: B008 - frozen
    window: Window | str | None = None,
    protected: Iterable[int] = frozenset(),
    target_tokens: npt.ArrayLike | None = None,
    draft_logits: npt.ArrayLike | None = None,
    n_answered: int = 0,
    seed: int = 0,
    answered: npt.ArrayLike | None = None,
    eog: Iterable[int] = frozenset(),
) -> Verification:
    """Verifies one step.

    Args:
        logits: float32 [K+1, V], the target's rows; row i is its distribution for draft token i, row K for the bonus.
            -inf is a forbidden token. One that is 2^32 times less likely than the most probable one, as after a bias of
            -100, is never accepted loosely either.
        draft: int [K], the drafted tokens; K may be 0.
        gate: The rule for mismatches.
        window: The condition for mismatches, or its written form; by default the FLy paper's window, for every gate,
            since there is only one step. For the same reason its `across_rounds` must not be True. Speculative
            sampling takes none.
        protected: Token ids that are never accepted loosely, on either side of a mismatch.
        target_tokens: int [K+1], the target's choices; None for the argmax of each row, or the draws of `Stochastic`.
        draft_logits: float32 [K, V], the draft's rows, for gates that compare them with the target's, `Fuzzy`, and for
            those that draw, `Stochastic` and rFSD: q = softmax(draft_logits[i]) is the distribution that draft token
            i was drawn from (None: nobody drew it), and p = softmax(logits[i]) is the target's final distribution, so
            divide by the temperature and give -inf to tokens that are cut off.
        n_answered: Tokens of the answer before this step, >= 0, for guards; without effect if `answered` is given.
        seed: 0..2**64-1, for the draws of `Stochastic` and rFSD; two steps need two seeds to be independent.
        answered: int [n_answered], the tokens of the answer before this step, for `NoRepeat`.
        eog: Token ids that end a text; protected as well. Nothing is emitted after one, and a window that is still
            open there does not hold.

    Returns:
        The accepted prefix, the emitted tokens, and the decision on every position.

    Raises:
        ValueError: a shape, a token id or a setting is wrong.
        NotFiniteError: a row has no distribution.
    """
    gate = require_gate(gate)
    window = require_window(window) or (gate.window if gate.draws else Window())
    n_answered = require_integer("n_answered", n_answered, 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer in 0..2**64-1, not {seed!r}.")
    if window.across_rounds:
        raise ValueError("verify() judges one step; leave the window's across_rounds at None or False.")
    in_step = replace(window, across_rounds=False)
    raw, tokens = _native.verify(
        logits, draft, draft_logits, gate.nodes(), in_step.config(), protected, eog, target_tokens, answered,
        n_answered, seed,
    )  # fmt: skip
    decisions = []
    for i, d in enumerate(raw):
        reason = REASONS[d.reason]
        decisions.append(
            Decision(
                position=i,
                match=reason == "match",
                gate=_GATE[reason],
                window=_WINDOW.get(reason, ""),
                reason=reason,
                choice=d.choice,
                entropy=d.entropy,
                margin=d.margin,
            )
        )
    n_accepted = next((i for i, decision in enumerate(decisions) if not decision.accepted), len(decisions))
    return Verification(n_accepted=min(n_accepted, len(tokens)), tokens=tokens, decisions=decisions)
