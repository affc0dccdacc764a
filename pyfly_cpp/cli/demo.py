"""`pyfly-cpp demo`: one answer without drafts and with them."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import click

from pyfly_cpp.cli.headings import HeadedCommand, number
from pyfly_cpp.cli.kinds import Int
from pyfly_cpp.cli.loading import MODEL_ARGUMENT, Models, model_options, reading
from pyfly_cpp.cli.measuring import look_at_machine
from pyfly_cpp.cli.terminal import AnswerWriter, note, write, write_sentences
from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.llama.fly_llama import FlyLlama

PROMPT = """Replace "a kilo" with "a pound" in this list:

- apples from the orchard behind the old mill: 3 dollars a kilo
- pears from the orchard behind the old mill: 4 dollars a kilo
- plums from the garden beside the railway station: 5 dollars a kilo
- cherries from the garden beside the railway station: 9 dollars a kilo
- walnuts from the tree in front of the village school: 7 dollars a kilo
- chestnuts from the forest north of the village school: 6 dollars a kilo
"""
"""An edit: the prompt contains most of the answer, so drafts are easy. Even the demo model can do it."""

_MOST_TURNS = 3
_MOST_SECONDS = 45.0
"""Longest time of all turns, unless the first one alone takes longer."""

_LEAST_SHARE = 0.01
"""The least ratio of speeds; a smaller difference is none."""


class Turn(NamedTuple):
    """One answer without drafts, and one with them: texts and counters."""

    plain: str
    drafted: str
    slow: Stats
    fast: Stats

    @property
    def times(self) -> float:
        """The ratio of their speeds; NaN if one is too short for a speed."""
        return self.fast.tokens_per_second / self.slow.tokens_per_second


@click.command("demo", cls=HeadedCommand, short_help="See one answer without drafts and with them.",
               epilog="Example: pyfly-cpp demo -m target.gguf")  # fmt: skip
@MODEL_ARGUMENT
@number("-n", "--max-tokens", kind=Int(2), default=200, help="Maximum answer length in tokens.")
@model_options
def command(models: Models, max_tokens: int) -> None:
    """Answer one edit prompt without drafts, then with drafts (losslessly, or by --preset), and compare. Both are
    repeated in turns, up to three times within 45 seconds."""
    look_at_machine()
    as_set = models.setting(adaptive=True)
    llm = models.load(FlyLlama, drafter=models.resolved().of(as_set))
    try:
        drafter = llm.resolved
        note(f"drafter: {' and '.join(map(str, drafter.drafters))} ({drafter.reason})")
        note(f"--- prompt ---\n{PROMPT}")
        answer(llm, PLAIN, None, 8)  # warms up
        turns: list[Turn] = []
        begun = time.monotonic()
        while not turns or (
            len(turns) < _MOST_TURNS and (time.monotonic() - begun) * (1 + 1 / len(turns)) < _MOST_SECONDS
        ):
            if turns:
                note(f"(measuring both again, turn {len(turns) + 1} of at most {_MOST_TURNS})")
            sides = []
            for title, setting, its_drafter in (("without drafts", PLAIN, None), ("with drafts", as_set, drafter)):
                if turns:
                    sides.append(answer(llm, setting, its_drafter, max_tokens))
                    continue
                note(f"--- {title} ---")
                sides.append(answer(llm, setting, its_drafter, max_tokens, is_shown=True))
                note(f"({sides[-1][1].summary()})")
            (plain, slow), (drafted, fast) = sides
            turns.append(Turn(plain, drafted, slow, fast))
    finally:
        llm.close()
    write_sentences(f"\n{_compared(turns, as_set)}")


def answer(
    llm: FlyLlama, setting: Decoding, drafter: Resolved | None, max_tokens: int, is_shown: bool = False
) -> tuple[str, Stats]:
    """The answer to PROMPT as a process gives it that has answered nothing before: its text, and what was counted.
    Drafters and the governor are made anew, so that they know nothing of earlier answers, which were the same."""
    llm.reset()
    llm.drafter = None
    llm.decoding = replace(setting, draft_max=0) if setting.is_plain else setting
    llm.drafter = drafter
    llm.reset_stats()
    texts, written = [], AnswerWriter()
    pieces = llm.write_chat([{"role": "user", "content": PROMPT}], temperature=0.0, max_tokens=max_tokens)
    with reading(llm) as bar, contextlib.closing(pieces):
        for piece in pieces:
            bar.stop()
            texts.append(piece.text)
            if is_shown:
                written.write(piece.text)
    if is_shown:
        write("\n")
    return "".join(texts), llm.stats


def _compared(turns: Sequence[Turn], setting: Decoding) -> str:
    """Texts and speeds, in sentences."""
    same = "Both texts are the same"
    if any(turn.plain != turn.drafted for turn in turns):
        same = "The texts differ, because " + (
            "two tokens were almost equally probable and kernels round differently in batches" if setting.is_exact
            else f"the gate {setting.gate} keeps drafts that are not the model's own choice"
        )  # fmt: skip
    ratios = sorted(turn.times for turn in turns)
    if any(map(math.isnan, ratios)):
        return f"{same}. They are too short for a speed; raise --max-tokens."
    fast = turns[0].fast
    if not fast.drafted:
        return f"{same}. Nothing was drafted: that would not be faster with this model on this machine."
    times = statistics.median(ratios)
    change = f"{times:.2f}x as fast" if abs(times - 1) > _LEAST_SHARE else "as fast as without them"
    spread = f" ({ratios[0]:.2f}x to {ratios[-1]:.2f}x in {len(ratios)} turns)" if len(ratios) > 1 else ""
    speeds = [
        statistics.median(one.tokens_per_second for one in side)
        for side in ([turn.slow for turn in turns], [turn.fast for turn in turns])
    ]
    return (
        f"{same}. With drafts it was {change}{spread}: {speeds[0]:.1f} and {speeds[1]:.1f} tokens/s; "
        f"{fast.acceptance:.0%} of {fast.drafted} drafts were right."
    )
