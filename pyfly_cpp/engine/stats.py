"""Counters and traces of a `FlyLlama`, as frozen dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pyfly_cpp import _native
from pyfly_cpp._native import GovernorState, RawRecord
from pyfly_cpp.decoding.verify import REASONS
from pyfly_cpp.errors import counted

_LEAST_TOKENS, _LEAST_STEPS = 16, 2
"""The fewest of which a speed is shown."""

_BY_NAME = ("accepted_by_drafter",)
"""The counters that are pairs of a name and a number."""

ORIGINS = tuple(_native.ORIGINS)


@dataclass(frozen=True)
class Governor:
    """The governor's estimates of costs and acceptance, and its choices (docs/how-it-decides.md)."""

    target_seconds: tuple[float, ...] = ()
    """Estimated cost of a target batch of 1, 2, ... rows; 0 if nothing is known yet."""
    draft_seconds: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """Estimated cost of drafting 1, 2, ... tokens, by drafter; 0 if unknown, or free."""
    catch_up_seconds: tuple[tuple[str, float], ...] = ()
    """Estimated cost of evaluating one token that a drafter has missed, by drafter; 0 if unknown, or free."""
    acceptance_at_depth: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """Estimated probability that a draft is accepted, given that those before it are; by drafter, first depth first."""
    rounds_at: tuple[int, ...] = ()
    """How often a draft length of 0, 1, 2, ... was chosen since the drafters were set: once a step, and once more if
    a window is given up because nothing is drafted."""

    @classmethod
    def of(cls, state: GovernorState, drafters: Sequence[str]) -> Governor:
        """The batch's state, with the names of its drafters."""
        return cls(
            target_seconds=state.target_seconds,
            draft_seconds=tuple(zip(drafters, state.draft_seconds)),
            catch_up_seconds=tuple(zip(drafters, state.catch_up_seconds)),
            acceptance_at_depth=tuple(zip(drafters, state.acceptance)),
            rounds_at=state.steps_at,
        )


@dataclass(frozen=True)
class Threads:
    """How many threads decode, if `n_threads="auto"` chooses (docs/how-it-decides.md)."""

    n: int
    """Threads of the next evaluation."""
    n_max: int
    """On a free machine: the physical cores."""
    changes: int
    """Times that another number was found to be better, since the model was loaded."""
    trials: int
    """Times that another number was tried, for a few evaluations."""


@dataclass(frozen=True)
class Stats:
    """Counters of a `FlyLlama`, since it was made or since `reset_stats()`. Seconds are wall time."""

    rounds: int = 0
    """Target batches that were verified, less those that were interrupted before anybody had a token of them."""
    drafted: int = 0
    """Tokens proposed to the target."""
    committed: int = 0
    """Tokens given out for good, an end-of-text token included. Tokens that the last step accepted after the end of
    the answer (a stop string, a limit) do not count, except while the generation is running, and in a `FlyBatch`."""
    matched: int = 0
    """Committed tokens that were drafted and are the target's own choice."""
    loose_accepted: int = 0
    """Committed tokens that were drafted and loosely accepted instead of the target's choice."""
    beginnings: int = 0
    """First steps: one of each answer. Their time is in `seconds_prefill`."""
    committed_first: int = 0
    """Committed tokens of first steps."""
    rejected_gate: int = 0
    """Mismatches rejected by the gate."""
    rejected_window: int = 0
    """Deferred mismatches whose window broke."""
    rejected_boundary: int = 0
    """Mismatches rejected because the window could not be decided before the end of the step."""
    rejected_safety: int = 0
    """Mismatches rejected because of a protected or forbidden token, one that cannot be taken, or one that the gate
    would take although it is as good as impossible (2^32 times less likely than the most probable one)."""
    rollbacks: int = 0
    """Times that tokens after a deferred mismatch were taken back."""
    rolled_back: int = 0
    """Tokens taken back by them."""
    window_fallbacks: int = 0
    """Windows across steps that fell back to their step (rejected at its end), because the model's memory (sliding
    window, recurrent state) could not have come back to their mismatch later."""
    prefilled: int = 0
    """Prompt tokens evaluated, without those that the context held already, and without the last one of each prompt,
    which is a part of its first step."""
    replayed: int = 0
    """Tokens evaluated again because the model's memory had to go back further than needed."""
    checkpoints: int = 0
    """Copies that were made of a recurrent state, to come back to: one for a prompt, for a draft that is deeper than
    its snapshots, and for a mismatch whose window outlives its step."""
    drafted_at_depth: tuple[int, ...] = ()
    """Drafted tokens by their place in the step's draft, the first one first."""
    accepted_at_depth: tuple[int, ...] = ()
    """Committed drafts (matched or loose), likewise."""
    accepted_by_drafter: tuple[tuple[str, int], ...] = ()
    """Committed drafts by the drafter that proposed them."""
    accepted_from_answers: int = 0
    """Right drafts that prompt lookup found in earlier answers."""
    governor: Governor | None = None
    """The governor's estimates (`adaptive=True`)."""
    threads: Threads | None = None
    """How many threads decode; None if you gave a number."""
    mean_margin_loose: float = math.nan
    """Mean ln p(top 1) - ln p(draft) of loose accepts, nats; NaN if there were none."""
    mean_margin_rejected: float = math.nan
    """The same of rejected mismatches; NaN if none was measured (`Exact()` measures none)."""
    seconds_prefill: float = 0.0
    """Prompt processing, the first step's batch included."""
    seconds_catch_up: float = 0.0
    """The part of these in which draft models and heads evaluated the prompt."""
    seconds_draft: float = 0.0
    """Drafting."""
    seconds_verify: float = 0.0
    """The target's batches."""
    seconds_gate: float = 0.0
    """Rows, gates, windows, sampling, rollback."""
    seconds_python: float = 0.0
    """FlyLlama's own Python between the native calls, with the caller's stopping criteria, but without what the caller
    does with each piece."""

    @property
    def mean_accepted(self) -> float:
        """Committed tokens per step, bonus included (the paper's tau); NaN before the first step."""
        return self.committed / self.rounds if self.rounds else math.nan

    @property
    def loose_rate(self) -> float:
        """Loose accepts / committed tokens; NaN before the first token."""
        return self.loose_accepted / self.committed if self.committed else math.nan

    @property
    def acceptance(self) -> float:
        """Accepted / drafted tokens; NaN if nothing was drafted."""
        return (self.matched + self.loose_accepted) / self.drafted if self.drafted else math.nan

    @property
    def acceptance_at_depth(self) -> tuple[float, ...]:
        """Accepted / drafted tokens by their place in the step's draft."""
        return tuple(a / d for a, d in zip(self.accepted_at_depth, self.drafted_at_depth) if d)

    @property
    def seconds_decode(self) -> float:
        """Everything but the prompt."""
        return self.seconds_draft + self.seconds_verify + self.seconds_gate + self.seconds_python

    @property
    def tokens_per_second(self) -> float:
        """Speed behind the first step; NaN for fewer than 16 tokens or two steps, which tell nothing of it.
        In a `FlyBatch`, by the share that a request has of the common batches."""
        n = self.committed - self.committed_first
        is_enough = n >= _LEAST_TOKENS and self.rounds - self.beginnings >= _LEAST_STEPS and self.seconds_decode > 0
        return n / self.seconds_decode if is_enough else math.nan

    @property
    def time_to_first_token(self) -> float:
        """Seconds of reading a prompt, to the end of the first step; mean of all answers, NaN before the first."""
        return self.seconds_prefill / self.beginnings if self.beginnings else math.nan

    def __repr__(self) -> str:
        """The fields that have counted something, without the governor's estimates; `as_dict` has all."""
        shown = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "governor" and value != one.default and value == value:  # NaN is not equal to itself
                shown.append(f"{one.name}={value:.4g}" if isinstance(value, float) else f"{one.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def as_dict(self) -> dict[str, object]:
        """All fields and derived figures, fit for JSON; NaN becomes None."""
        out: dict[str, object] = asdict(self)
        for name in _BY_NAME:
            out[name] = dict(getattr(self, name))
        if self.governor is not None:
            out["governor"] = {
                **asdict(self.governor),
                "draft_seconds": dict(self.governor.draft_seconds),
                "catch_up_seconds": dict(self.governor.catch_up_seconds),
                "acceptance_at_depth": dict(self.governor.acceptance_at_depth),
            }
        for name in (
            "mean_accepted", "loose_rate", "acceptance", "acceptance_at_depth", "seconds_decode", "tokens_per_second",
            "time_to_first_token",
        ):  # fmt: skip
            out[name] = getattr(self, name)
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in out.items()}

    def since(self, before: Stats) -> Stats:
        """The counters and seconds since `before`. Means and figures by depth are those of now."""
        more: dict[str, Any] = {
            field.name: getattr(self, field.name) - getattr(before, field.name)
            for field in fields(Stats)
            if isinstance(getattr(self, field.name), (int, float)) and not field.name.startswith("mean_")
        }
        for name in _BY_NAME:
            earlier = dict(getattr(before, name))
            more[name] = tuple((of, n - earlier.get(of, 0)) for of, n in getattr(self, name))
        return replace(self, **more)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Stats:
        """Reads the result of `as_dict`, without the governor's estimates; None becomes NaN."""
        kept = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        kept = {name: value for name, value in kept.items() if name not in ("governor", "threads")}
        values: dict[str, Any] = {name: math.nan if value is None else value for name, value in kept.items()}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        pairs = {name: tuple(value.items()) for name, value in values.items() if isinstance(value, dict)}
        values.update(**lists, **pairs)
        return cls(**values)

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        rate, wait = self.tokens_per_second, self.time_to_first_token
        rows = {
            "tokens": f"{self.committed} in {counted(self.rounds, 'step')}",
            "tokens per second": "–" if math.isnan(rate) else f"{rate:.1f}",
            "time to first token": "–" if math.isnan(wait) else f"{wait:.2f} s",
            "drafts accepted": f"{self.matched + self.loose_accepted} of {self.drafted}",
            "accepted loosely": f"{self.loose_accepted}",
        }
        cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
        return f"<table>{cells}</table>"

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """One line for people."""
        if not self.rounds:
            return "no tokens yet"
        parts = [f"{counted(self.committed, 'token')} in {counted(self.rounds, 'step')}"]
        if self.beginnings == 1:
            parts.append(f"first after {self.time_to_first_token:.1f} s")
        if not math.isnan(self.tokens_per_second):
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        parts.append(f"{self.mean_accepted:.2f} tokens per step")
        if self.drafted:
            parts.append(f"{self.acceptance:.0%} of {self.drafted} drafts accepted")
        if self.loose_accepted:
            parts.append(f"{self.loose_rate:.1%} loose")
        if self.rolled_back:
            parts.append(f"{self.rolled_back} rolled back")
        return ", ".join(parts)


@dataclass(frozen=True)
class Step:
    """The counts of one step (`Request.log_steps`). A provisional token counts as drafted in its own step; as matched
    or loose, and as committed, in the one that decides on it. Tokens of the last step after the end of the answer are
    counted here, unlike in `Stats`."""

    committed: int
    """Tokens given out for good."""
    drafted: int
    """Tokens proposed to the target."""
    matched: int
    """Committed drafts that are the target's own choice."""
    loose_accepted: int
    """Committed drafts that are not."""
    seconds: float
    """Wall time of drafting, the target's batch and verification."""


@dataclass(frozen=True)
class Record:
    """How one committed token was produced (`trace=True`)."""

    position: int
    """Place in the sequence, 0 for the first prompt token."""
    token: int
    """Token id."""
    origin: str
    """`"matched"`: drafted, the target's choice; `"loose"`: drafted, loosely accepted; `"target"`: the target's own."""
    choice: int
    """The target's choice here; equals `token` unless loose."""
    depth: int
    """1-based place in its step's draft; 0 for the target's own."""
    reason: str
    """`"match"`, `"loose"`; for the target's own token, the reason why the draft was rejected here, or `"bonus"`."""
    round: int
    """Which step of the generation produced it, from 0."""
    entropy: float
    """Entropy of the target's row, nats: of its top n if the gate measures that, else of the whole row."""
    margin: float
    """ln p(top 1) - ln p(drafted token), nats."""
    logprob: float
    """ln p(token), nats."""
    rejected: tuple[int, ...] = ()
    """The drafts that were rejected here, in order."""

    @classmethod
    def of(cls, raw: RawRecord) -> Record:
        """The batch's record, in words."""
        reason = "bonus" if raw.reason < 0 else REASONS[raw.reason]
        fields = {**raw._asdict(), "origin": ORIGINS[raw.origin], "reason": reason}
        return cls(round=fields.pop("step"), **fields)

    @property
    def probability(self) -> float:
        """p(token) of the target, at temperature 1."""
        return math.exp(self.logprob)
