"""The thresholds of one gate side by side: how fast each is, and how much its outputs differ from exact ones.

Choosing a threshold like this on 8 to 16 prompts is the idea of fuzzy speculative decoding (Holsman et al. 2025, arXiv
2502.20704).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters import Drafter, as_given
from pyfly_cpp.decoding.gates import Gate, at_thresholds
from pyfly_cpp.decoding.presets import Preset
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.measure.speed import Measured, Summary, by_setting, summarise
from pyfly_cpp.measure.statistics import Interval, for_json, jackknife, low_of_several, ratio
from pyfly_cpp.models.named import model_file

THRESHOLDS = {
    "margin": (0.075, 0.15, 0.3, 0.6, 1.2),
    "entropy": (0.85, 0.6, 0.42, 0.3, 0.21, 0.15),
    "entropy-normalized": (0.3, 0.15, 0.075, 0.038, 0.019),
    "fuzzy-js": (0.025, 0.05, 0.1, 0.2, 0.4),
}
"""Thresholds of a gate if nobody gives others, from strict to loose. Margins, entropies and divergences of mismatches
spread over orders of magnitude, so the steps are geometric: each lets about as many more of them pass, and a few
prompts can tell it from the one before. A published value is among them, where there is one."""


def read_sweep(text: str) -> dict[float, Gate]:
    """The gates of `margin` or `margin:0.1,0.3,1` by their thresholds; raises ValueError."""
    word, colon, numbers = text.strip().partition(":")
    thresholds: Sequence[float] = THRESHOLDS.get(word, ())
    if colon:
        try:
            thresholds = list(map(float, numbers.split(",")))
        except ValueError:
            raise ValueError(
                f"cannot read the thresholds {numbers!r}; write numbers, as in margin:0.1,0.3,1."
            ) from None
    gates = dict(zip(thresholds, at_thresholds(word, thresholds)))
    if not gates:
        raise ValueError(f"give thresholds of {word}, as in {word}:0.1,0.2; only {', '.join(THRESHOLDS)} have some.")
    return gates


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """How much two outputs have in common, 0..1: twice the tokens in matching runs, in order, over the tokens of both
    (Ratcliff and Obershelp). Two texts with the same meaning in other words score low: it is a strict measure."""
    if not tokens and not reference:
        return 1.0
    return difflib.SequenceMatcher(None, list(tokens), list(reference), autojunk=False).ratio()


@dataclass(frozen=True)
class Point:
    """Exact decoding, or one threshold."""

    summary: Summary
    agreement: Interval
    """Mean agreement of its outputs with the exact ones, 0..1."""

    @property
    def setting(self) -> str:
        """The written form of the setting."""
        return self.summary.setting

    @property
    def speedup(self) -> float:
        """Speed over that of exact decoding."""
        return 1.0 if self.summary.speedup_exact is None else self.summary.speedup_exact.estimate

    def is_clearly_faster(self, n_others: int) -> bool:
        """Whether the whole interval of its speed is above that of exact, if the fastest of `n_others` thresholds is
        looked for, itself included; not known (no) with few prompts."""
        gain = self.summary.speedup_exact
        return gain is not None and low_of_several(gain, self.summary.n_prompts, n_others) > 1

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; the rest is in the summaries."""
        return {"setting": self.setting, "agreement": for_json(self.agreement)}


def points_of(measured: Sequence[Measured], gates: Iterable[Gate]) -> list[Point]:
    """Exact decoding, then the gates of a sweep."""
    outputs = by_setting(measured)
    summaries = {summary.setting: summary for summary in summarise(measured)}
    points = []
    for setting in dict.fromkeys(["exact", *(str(Decoding(gate)) for gate in gates)]):
        rows = [(m, outputs["exact"][key]) for key, m in outputs[setting].items()]
        shares = [[agreement(m.result.tokens, exact.result.tokens), 1.0] for m, exact in rows]
        common = jackknife(shares, ratio, [m.prompt.unit for m, _ in rows])
        points.append(Point(summaries[setting], replace(common, high=min(common.high, 1.0))))
    return points


def fastest(points: Sequence[Point], least_agreement: float) -> Point:
    """The fastest threshold of those that agree so much and are clearly faster than exact decoding; else exact. The
    more of them agree so much, the surer each must be, so that no more than one choice of 40 is due to chance."""
    exact, *others = points
    agreeing = [one for one in others if one.agreement.estimate >= least_agreement]
    able = [one for one in agreeing if one.is_clearly_faster(len(agreeing))]
    return max(able, key=lambda one: one.speedup, default=exact)


def make_preset(setting: Decoding, model: str | os.PathLike[str], drafters: Resolved, claim: dict[str, Any]) -> Preset:
    """The preset of a setting without the governor, with the models it was measured with."""
    parts = [_with_whole_paths(part) for part in drafters.needed.as_used(setting).drafters]
    # What was measured, whatever a gate's own may be one day; a lossless one has no use for it.
    window = None if setting.gate.is_lossless else setting.effective_window
    decoding = replace(setting, window=window, drafter=as_given(parts))
    return Preset(decoding, os.path.abspath(model), claim)


def _with_whole_paths(part: Drafter) -> Drafter:
    """A drafter whose files are found from any folder."""
    given = {name: getattr(part, name) for name in part.path_fields}
    if part.file is not None:
        given[part.file_field] = model_file(part.file)
    paths = {
        name: tuple(map(os.path.abspath, value)) if isinstance(value, tuple) else os.path.abspath(value)
        for name, value in given.items()
        if value
    }
    return part.but(**paths) if paths else part
