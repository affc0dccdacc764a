"""Counters of requests: `pyfly_stats` of pyfly.h."""

from __future__ import annotations

import math
from typing import Any

from pyfly_cpp._native.library import ffi, lib

_FIELDS = ffi.typeof("pyfly_stats").fields

_NAMES = (
    "steps", "drafted", "committed", "matched", "loose_accepted", "beginnings", "committed_first",
    "rejected_gate", "rejected_window", "rejected_boundary", "rejected_safety", "rollbacks", "rolled_back",
    "window_fallbacks", "prefilled", "replayed", "checkpoints", "accepted_from_answers",
)  # fmt: skip

_PARTS = ("prefill", "catch_up", "draft", "verify", "gate")


class Counters:
    """Counters at one moment. Nothing at first; can be added and subtracted."""

    def __init__(self) -> None:
        self._raw = ffi.new("pyfly_stats *")

    @classmethod
    def of(cls, batch: Any, slot: int) -> Counters:
        """A slot's."""
        counters = cls()
        lib.pyfly_batch_stats(batch, slot, counters._raw)
        return counters

    def __add__(self, other: Counters) -> Counters:
        return self._plus(other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return self._plus(other, -1)

    def _plus(self, other: Counters, sign: int) -> Counters:
        out = Counters()
        for name, field in _FIELDS:
            a, b = getattr(self._raw, name), getattr(other._raw, name)
            if field.type.kind == "array":
                getattr(out._raw, name)[0 : field.type.length] = [x + sign * y for x, y in zip(a, b)]
            else:
                setattr(out._raw, name, a + sign * b)
        return out

    def fields(self) -> dict[str, Any]:
        """By the names of `Stats`, but for its `rounds`; `accepted_by` by drafter."""
        s = self._raw
        drafted = list(s.drafted_at)
        n_depth = max((i + 1 for i, n in enumerate(drafted) if n), default=0)
        return {
            **{name: int(getattr(s, name)) for name in _NAMES},
            "drafted_at_depth": tuple(drafted[:n_depth]),
            "accepted_at_depth": tuple(list(s.accepted_at)[:n_depth]),
            "accepted_by": tuple(s.accepted_by),
            "mean_margin_loose": s.sum_margin_loose / s.loose_accepted if s.loose_accepted else math.nan,
            "mean_margin_rejected": s.sum_margin_rejected / s.n_margin_rejected if s.n_margin_rejected else math.nan,
            **{f"seconds_{part}": getattr(s, f"us_{part}") / 1e6 for part in _PARTS},
        }

    @property
    def accepted(self) -> tuple[int, int, int]:
        """The counters drafted, matched and loose_accepted."""
        return int(self._raw.drafted), int(self._raw.matched), int(self._raw.loose_accepted)
