"""Finds the fastest setting whose outputs stay within a budget, from a few prompts of the user's own.

Four stages, each measured interleaved with `exact`, and ranked by the speed over exact: (1) drafter and K, losslessly;
(2) gates and windows with the best of these; (3) window and K around the best that keeps the budget; (4) the choice
again, along with plain, exact and the best lossless setting, since the best of many noisy measurements looks better
than it is. A lossy setting must then keep the budget and be clearly faster than the best lossless one, and any must be
faster than plain decoding.
That is a greedy search, not every combination.

In stage 2 every gate climbs its ladder of thresholds (`gates.ladder`), once with each window. Its foot is exact
decoding, which stage 1 has measured. It climbs until it leaves the budget, is as fast as was asked for, or rejects
nothing. Tuning a threshold like this on 8 to 16 prompts is the idea of fuzzy speculative decoding (Holsman
et al. 2025, arXiv 2502.20704).
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyfly_cpp.bench.measure import Measured, measure
from pyfly_cpp.bench.prompts import BenchPrompt
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding, as_in_chat
from pyfly_cpp.decoding.drafters import WORDS, require_drafters
from pyfly_cpp.decoding.gates import N_RUNGS, Gate, Stochastic, ladder
from pyfly_cpp.decoding.windows import Window
from pyfly_cpp.engine.arguments import draft_max_of
from pyfly_cpp.errors import counted
from pyfly_cpp.evaluation.generation import Generator, Sampling
from pyfly_cpp.evaluation.statistics import MIN_GROUPS, Interval, bootstrap, for_json, ratio, speed, speedup

MIN_PROMPTS = MIN_GROUPS
"""With fewer there is no interval, and without one nothing lossy is ever shown to be faster."""

GATES = ("margin", "entropy")
"""The words of the gates that climb in stage 2 by default."""

DEPTHS = (4, 8, 16)
"""K tried in stage 1."""

HEAD_DEPTHS = (2, 3, 5)
"""The same for heads."""

SIZES = (2, 4, 10)
"""W tried in stage 3, besides the default."""


@dataclass(frozen=True)
class Budget:
    """How far outputs may stray from those of exact decoding, and what for."""

    agreement: float = 0.8
    """Least mean agreement with the exact output, 0..1 (see `agreement`)."""
    lost_answers: int = 0
    """Most prompts whose answer exact decoding gives and the setting does not."""
    until_speed: float = math.inf
    """The speed over exact that is enough, > 0: of the settings that have it, the one that strays least is best."""

    def worth(self, candidate: Candidate) -> tuple[float, ...]:
        """What candidates within the budget are ranked by."""
        gain, agreement = candidate.speedup.estimate, candidate.agreement.estimate
        return min(gain, self.until_speed), 1.0 if candidate.setting.is_exact else agreement, gain


@dataclass(frozen=True)
class Candidate:
    """A measured setting."""

    setting: Decoding
    speedup: Interval
    """Over exact, measured in the same stage."""
    tokens_per_second: Interval
    agreement: Interval
    n_answered: int
    """Prompts whose known answer it gives."""
    n_lost: int
    """Prompts whose answer exact decoding gives and it does not."""
    n_answers: int
    """Prompts with a known answer."""

    def within(self, budget: Budget) -> bool:
        """Whether it keeps the budget."""
        return self.setting.is_exact or (
            self.agreement.estimate >= budget.agreement and self.n_lost <= budget.lost_answers
        )

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {
            "setting": str(self.setting),
            "speedup_over_exact": for_json(self.speedup),
            "tokens_per_second": for_json(self.tokens_per_second),
            "agreement": for_json(self.agreement),
            "answers": {"known": self.n_answers, "given": self.n_answered, "lost": self.n_lost},
        }


@dataclass(frozen=True)
class Tuned:
    """The result."""

    chosen: Candidate
    """As measured in the search."""
    fastest: Candidate
    """The best of the search within the budget: the choice, unless it failed when measured again."""
    over_lossless: Interval | None
    """Speed of a lossy `fastest` over the best lossless setting, measured afresh; None if it is lossless itself."""
    keeps_budget: bool
    """Whether `fastest` kept the budget when it was measured afresh."""
    candidates: tuple[Candidate, ...]
    """All that were measured, in order."""
    confirmation: tuple[Measured, ...]
    """plain, exact, the best lossless setting and the fastest, measured afresh."""
    n_prompts: int
    """Forms of one prompt counted once."""


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """How much two outputs have in common, 0..1: twice the tokens in matching runs, in order, over the tokens of both
    (Ratcliff and Obershelp). Two texts with the same meaning in other words score low: it is a strict measure."""
    if not tokens and not reference:
        return 1.0
    return difflib.SequenceMatcher(None, list(tokens), list(reference), autojunk=False).ratio()


def assess(measured: Sequence[Measured], setting: Decoding, reference: Decoding = EXACT) -> Candidate:
    """Judges one setting of a measurement against the reference in it."""
    by_setting: dict[str, list[Measured]] = {}
    for m in measured:
        by_setting.setdefault(m.setting, []).append(m)
    key = lambda m: (m.prompt.id, m.turn, m.repeat)  # noqa: E731
    mine = sorted(by_setting[str(setting)], key=key)
    theirs = sorted(by_setting[str(reference)], key=key)
    groups = [m.prompt.unit for m in mine]
    timed = [m.timed for m in mine]
    shares = [[agreement(a.result.tokens, b.result.tokens), 1.0] for a, b in zip(mine, theirs)]
    known = [(a, b) for a, b in zip(mine, theirs) if a.prompt.answer and a.turn == len(a.prompt.turns) - 1]
    right = [(m_right(a), m_right(b)) for a, b in known]
    return Candidate(
        setting,
        speedup(timed, [m.timed for m in theirs], groups),
        speed(timed, groups),
        bootstrap(shares, ratio, groups),
        sum(a for a, _ in right),
        sum(b and not a for a, b in right),
        len(right),
    )


def m_right(m: Measured) -> bool:
    """Whether an output contains the prompt's answer, letter case aside."""
    return m.prompt.answer.lower() in m.result.text.lower()


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both speed and agreement, fastest first."""
    out: list[Candidate] = []
    best = -1.0
    for candidate in sorted(candidates, key=lambda c: (-c.speedup.estimate, -c.agreement.estimate)):
        if candidate.agreement.estimate > best:
            out.append(candidate)
            best = candidate.agreement.estimate
    return out


def first_settings(words: Sequence[str]) -> list[Decoding]:
    """Every drafter with every K of stage 1."""
    return [Decoding(drafter=word, draft_max=k) for word in words for k in _depths(word)]


def _depths(word: str) -> tuple[int, ...]:
    return HEAD_DEPTHS if any(kind.is_head for kind in WORDS[word.partition(":")[0]]) else DEPTHS


def _fits(generator: Generator, setting: Decoding) -> bool:
    """Whether its K is possible: a batch has an end, and chained heads draft one token each."""
    try:
        generator.require([setting])
    except ValueError:
        return False
    return True


def _can_defer(generator: Generator, setting: Decoding) -> bool:
    """Whether it can be looser than exact; one that cannot is exact under another name."""
    return setting.is_exact or setting.effective_window.n_strict < _draft_max(generator, setting)


def _draft_max(generator: Generator, setting: Decoding) -> int:
    """K, spelled out."""
    parts = require_drafters(generator.drafters.of(setting))
    return max((draft_max_of(part, setting.draft_max) for part in parts), default=0)


def _spelled_out(generator: Generator, setting: Decoding) -> object:
    """Equal for settings that do the same under different names."""
    drafter = generator.drafters.of(setting)
    return setting.gate, setting.effective_window, drafter, _draft_max(generator, setting), bool(setting.adaptive)


def ladders(generator: Generator, base: Decoding, word: str) -> list[list[Decoding]]:
    """The settings that a gate climbs from `base`, for each window that it is tried with: `reconverge`, and as much of
    `agree` as fits into a step, or none if the gate has none of its own; a gate that draws takes none at all."""
    gates = ladder(word)
    # Under "agree" a mismatch can stand only if W positions of its step follow it.
    agree = Window(rule="agree", size=min(6, max(0, _draft_max(generator, base) - 2)))
    windows = [None] if gates[0].draws else [Window(rule="reconverge"), agree if gates[0].window.size else None]
    return [[replace(base, gate=gate, window=window) for gate in gates] for window in windows]


def _able(
    generator: Generator, prompt: BenchPrompt, settings: Sequence[Decoding], gate: Gate, temperature: float
) -> list[Decoding]:
    """Those of the settings whose drafter has the rows that the gate looks at, which its first step shows; raises
    ValueError if there is none."""
    if not gate.compares_drafts:
        return list(settings)
    rendered = generator.render([{"role": "user", "content": prompt.turns[0]}])
    refusals: dict[Any, ValueError | None] = {}
    for setting in settings:
        drafter = generator.drafters.of(setting)
        if drafter not in refusals:
            try:
                generator.generate(rendered, replace(setting, gate=gate, window=None), 1, temperature)
                refusals[drafter] = None
            except ValueError as error:
                refusals[drafter] = error
    able = [setting for setting in settings if refusals[generator.drafters.of(setting)] is None]
    if not able:
        raise ValueError(f"cannot tune {gate}: {next(iter(refusals.values()))}")
    return able


def decide(
    fastest: Candidate, lossless: Candidate, plain: Candidate, confirmation: Sequence[Measured], budget: Budget
) -> tuple[Candidate, Interval | None, bool]:
    """The choice among the fastest setting, the best lossless one and plain decoding, all measured afresh, with
    `Tuned.over_lossless` and `Tuned.keeps_budget`: what is lossy must keep the budget and be faster with its whole
    interval, what drafts faster than plain decoding."""
    chosen, over, keeps = fastest, None, True
    if not fastest.setting.is_exact:
        over = assess(confirmation, fastest.setting, lossless.setting).speedup
        keeps = assess(confirmation, fastest.setting).within(budget)
        chosen = fastest if over.low > 1 and keeps else lossless
    if not chosen.setting.is_plain and assess(confirmation, chosen.setting, plain.setting).speedup.estimate <= 1:
        chosen = plain
    return chosen, over, keeps


def tune(
    generator: Generator,
    prompts: Sequence[BenchPrompt],
    budget: Budget,
    max_tokens: int,
    words: Sequence[str],
    progress: Callable[[str, int, int, str], None] | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    gates: Sequence[str] = GATES,
) -> Tuned:
    """Searches (see the head of this file).

    Args:
        words: The drafters to try, as in settings.
        progress: Called with (stage, done, of, what) after every generation.
        gates: Words of the gates to try, of `gates.KNOBS`.

    Raises:
        ValueError: fewer than `MIN_PROMPTS` prompts, a prompt does not fit in the context or no K in a batch, a gate
            has no threshold, or compares distributions of which none of the drafters has any.
    """
    n_prompts = len({prompt.unit for prompt in prompts})
    if n_prompts < MIN_PROMPTS:
        few = counted(n_prompts, "prompt")
        raise ValueError(f"{few} cannot be tuned on; give at least {MIN_PROMPTS}, better 8 to 16.")
    candidates: dict[Decoding, Candidate] = {}
    is_full: dict[Decoding, bool] = {}  # the gate rejected nothing: a looser one would change nothing
    governed = as_in_chat(sampling.temperature)
    names = {_spelled_out(generator, setting): setting for setting in (PLAIN, governed, EXACT)}

    def once(settings: Sequence[Decoding]) -> list[Decoding]:
        """Each under the name it got first: two names of one setting would only measure the noise."""
        return list(dict.fromkeys(names.setdefault(_spelled_out(generator, s), s.canonical()) for s in settings))

    def run(stage: str, settings: Sequence[Decoding]) -> list[Measured]:
        n = len(settings) * sum(len(prompt.turns) for prompt in prompts)
        report = (lambda done, what: progress(stage, done, n, what)) if progress is not None else None
        with warnings.catch_warnings():  # of gates that are only tried
            warnings.filterwarnings("ignore", "the (gate|threshold) ")
            return measure(generator, prompts, settings, max_tokens, progress=report, sampling=sampling)

    def search(stage: str, settings: Sequence[Decoding]) -> None:
        wanted = list(dict.fromkeys([EXACT, *settings]))
        measured = run(stage, wanted)
        for setting in wanted:
            candidates.setdefault(setting, assess(measured, setting))
            mine = [m.result.stats for m in measured if m.setting == str(setting)]
            is_full[setting] = not any(stats.rejected_gate for stats in mine)

    def best(among: Iterable[Decoding]) -> Candidate:
        kept = [candidates[s] for s in among if s in candidates and candidates[s].within(budget)]
        return max(kept, key=budget.worth)

    def climbs_on(setting: Decoding) -> bool:
        candidate = candidates[setting]
        is_enough = candidate.speedup.estimate >= budget.until_speed
        return candidate.within(budget) and not is_enough and not is_full[setting]

    wanted = first_settings(words)
    first = once([setting for setting in wanted if _fits(generator, setting)])
    if not first:
        lengths = ", ".join(f"{k}" for k in sorted({setting.draft_max or 0 for setting in wanted}))
        raise ValueError(f"no K of {lengths} fits a batch of {generator.llm.n_batch}; raise --n-batch.")
    bases = {word: _able(generator, prompts[0], first, ladder(word)[0], sampling.temperature) for word in gates}
    search("1/4 drafter and K", [PLAIN, governed, *first])
    start = best(first).setting
    feet = [(word, best(bases[word]).setting) for word in gates]
    climbing = [once(settings) for word, foot in feet if climbs_on(foot) for settings in ladders(generator, foot, word)]
    is_drawn = sampling.temperature > 0
    tried = once([start, replace(start, gate=Stochastic(), window=None)] if is_drawn else [start])
    for rung in range(N_RUNGS):
        climbing = [settings for settings in climbing if rung < len(settings)]
        tried += [settings[rung] for settings in climbing]
        if new := [setting for setting in dict.fromkeys(tried) if setting not in candidates]:
            search(f"2/4 gate, threshold {rung + 1} of at most {N_RUNGS}", new)
        climbing = [settings for settings in climbing if climbs_on(settings[rung])]
    leader = best(tried).setting
    drafter = generator.drafters.of(leader)
    around = [replace(leader, draft_max=s.draft_max) for s in first if generator.drafters.of(s) == drafter]
    if not leader.is_exact:
        around.append(replace(leader, draft_max=None, adaptive=True))
    if not leader.is_exact and not leader.gate.draws:
        around += [replace(leader, window=replace(leader.effective_window, size=size)) for size in SIZES]
    if new := [s for s in once(around) if s not in candidates and _can_defer(generator, s)]:
        search("3/4 window and K", new)
    fastest = best(candidates)
    lossless = best([setting for setting in candidates if setting.is_exact])
    confirmation = run("4/4 the choice again", once([PLAIN, EXACT, lossless.setting, fastest.setting]))
    chosen, over, keeps = decide(fastest, lossless, candidates[PLAIN], confirmation, budget)
    return Tuned(chosen, fastest, over, keeps, tuple(candidates.values()), tuple(confirmation), n_prompts)
