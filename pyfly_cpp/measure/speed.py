"""What a benchmark measures of each generation, and the summary of a setting. What "speed" is: generator.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.engine.stats import Step
from pyfly_cpp.machine.conditions import resident_mib
from pyfly_cpp.machine.prompt_sets import BenchPrompt
from pyfly_cpp.measure.generator import Generated, Generator
from pyfly_cpp.measure.pace import Decoded, Pace, pace

SPLIT = ("draft", "verify", "gate", "python")
"""Parts of decoding time that `Stats` measures; the rest is what is left of the wall time."""


Key = tuple[str, int, int, str, int]
"""A generation in a measurement: prompt, turn, repeat, setting, number of requests."""


@dataclass(frozen=True)
class Measured:
    """One generation of a measurement."""

    prompt: BenchPrompt
    turn: int
    repeat: int
    setting: str
    n_prompt: int
    """Length of the prompt, tokens."""
    result: Generated
    n_parallel: int = 1
    """Requests that ran at a time."""

    @property
    def key(self) -> Key:
        """Which generation of a measurement it is."""
        return self.prompt.id, self.turn, self.repeat, self.setting, self.n_parallel

    @property
    def timed(self) -> tuple[int, float]:
        """Tokens and seconds of decoding."""
        return self.result.decode_tokens, self.result.decode_seconds

    @property
    def decoded(self) -> Decoded:
        """The part of it that the speed of a setting is made of."""
        stats = self.result.stats
        return Decoded(*self.timed, stats.committed, stats.rounds, stats.loose_accepted)

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding; 0 if nothing was decoded after the first step."""
        return self.result.decode_tokens / self.result.decode_seconds if self.result.decode_seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        result = self.result
        return {
            "prompt": self.prompt.id,
            "category": self.prompt.category,
            "turn": self.turn,
            "repeat": self.repeat,
            "setting": self.setting,
            "n_parallel": self.n_parallel,
            "n_prompt": self.n_prompt,
            "finish": result.finish,
            "decode_tokens": result.decode_tokens,
            "decode_seconds": result.decode_seconds,
            "seconds_prompt": result.seconds_prompt,
            "arrivals": [_brief(seconds) for seconds in result.arrivals],
            "stats": result.stats.as_dict(),
            "rounds": {f.name: [_brief(getattr(r, f.name)) for r in result.steps] for f in fields(Step)},
            "output": result.text,
        }


def _brief(value: float) -> float:
    return round(value, 6) if isinstance(value, float) else value


@dataclass(frozen=True)
class Memory:
    """Memory of this process that a setting needs, MiB."""

    resident: float
    """In RAM after a short generation with target and drafter, mapped model files included."""
    growth: float
    """More than the target alone, likewise after a short generation."""


def measure_memory(generator: Generator, prompt: BenchPrompt, settings: Sequence[Decoding]) -> dict[str, Memory]:
    """The memory of each setting by its name; empty if the system does not tell. One drafter is loaded at a time.

    It is this process's: what a GPU holds is not in it, and of what was freed before, a few MiB may still be.
    """

    def resident(setting: Decoding) -> float | None:
        generator.llm.drafter = None
        generator.forget(0)
        warm_up(generator, prompt, [setting])
        return resident_mib()

    alone = resident(PLAIN)
    out: dict[str, Memory] = {}
    for setting in settings:
        size = resident(setting)
        if size is not None and alone is not None:
            out[str(setting)] = Memory(size, size - alone)
    return out


def warm_up(generator: Generator, prompt: BenchPrompt, settings: Sequence[Decoding]) -> None:
    """Generates a few tokens with each setting."""
    rendered = generator.render([{"role": "user", "content": prompt.turns[0]}])
    for setting in settings:
        generator.generate(rendered, setting, 16)


@dataclass(frozen=True)
class Summary(Pace):
    """One setting over all prompts, or those of a category."""

    n_prompts: int
    """Forms of one prompt counted once."""
    acceptance: float
    acceptance_at_depth: tuple[float, ...]
    same_output: float | None
    """Share of the outputs that are those of plain decoding, or of `exact` if that is left out."""
    split: dict[str, float]
    """Shares of decoding time."""


BySetting = dict[str, dict[tuple[str, int, int], Measured]]
"""Generations by setting, and by prompt, turn and repeat."""


def by_setting(measured: Iterable[Measured]) -> BySetting:
    """The generations of each setting, in the order in which the settings first occur."""
    out: BySetting = {}
    for m in measured:
        out.setdefault(m.setting, {})[m.prompt.id, m.turn, m.repeat] = m
    return out


def summarise(measured: Sequence[Measured], category: str | None = None) -> list[Summary]:
    """A summary for each setting, in the order in which they first occur; of one category, or of all (None)."""
    chosen = by_setting(m for m in measured if category is None or m.prompt.category == category)
    return [_summary(setting, chosen) for setting in chosen]


def _summary(setting: str, measured: BySetting) -> Summary:
    mine = measured[setting]
    keys = list(mine)
    groups = [mine[key].prompt.unit for key in keys]
    results = [mine[key].result for key in keys]

    stats = [r.stats for r in results]
    drafted = sum(s.drafted for s in stats)
    reference = "plain" if "plain" in measured else "exact"
    theirs = measured.get(reference) if setting != reference else None
    return Summary(
        **vars(pace(setting, {name: [rows[key].decoded for key in keys] for name, rows in measured.items()}, groups)),
        n_prompts=len(set(groups)),
        acceptance=sum(s.matched + s.loose_accepted for s in stats) / drafted if drafted else math.nan,
        acceptance_at_depth=_by_depth(results),
        same_output=sum(mine[k].result.tokens == theirs[k].result.tokens for k in keys) / len(keys) if theirs else None,
        split=_split(results),
    )


def _by_depth(results: Sequence[Generated]) -> tuple[float, ...]:
    depth = max((len(r.stats.drafted_at_depth) for r in results), default=0)
    out = []
    for i in range(depth):
        drafted = sum(r.stats.drafted_at_depth[i] for r in results if i < len(r.stats.drafted_at_depth))
        accepted = sum(r.stats.accepted_at_depth[i] for r in results if i < len(r.stats.accepted_at_depth))
        out.append(accepted / drafted if drafted else 0.0)
    return tuple(out)


def _split(results: Sequence[Generated]) -> dict[str, float]:
    """Seconds of everything but the prompt. The first step's draft is included, as in `Stats`."""
    parts = {name: sum(getattr(r.stats, f"seconds_{name}") for r in results) for name in SPLIT}
    whole = sum(r.seconds_prompt + r.decode_seconds - r.stats.seconds_prefill for r in results)
    if whole <= 0:
        return {}
    parts["rest"] = max(0.0, whole - sum(parts.values()))
    return {name: seconds / whole for name, seconds in parts.items()}
