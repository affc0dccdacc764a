"""`pyfly-cpp demo`: one answer without drafts and with them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import click

from pyfly_cpp.cli.headings import HeadedCommand, number
from pyfly_cpp.cli.kinds import Int
from pyfly_cpp.cli.loading import MODEL_ARGUMENT, Models, model_options, reading
from pyfly_cpp.cli.terminal import Answer, note, write, write_sentences
from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.decoding.drafters import require_drafters
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.llama.fly_llama import FlyLlama

_PROMPT = """Copy this list, with every price in euros instead of dollars. Change nothing else.

- apples from the orchard behind the old mill: 3 dollars a kilo
- pears from the orchard behind the old mill: 4 dollars a kilo
- plums from the garden beside the railway station: 5 dollars a kilo
- cherries from the garden beside the railway station: 9 dollars a kilo
- walnuts from the tree in front of the village school: 7 dollars a kilo
- chestnuts from the forest north of the village school: 6 dollars a kilo
"""
"""An edit: most of the answer stands in the prompt, so that drafts are easy."""

_LEAST_SHARE = 0.01
"""The least ratio of speeds; a smaller difference is none."""


@click.command("demo", cls=HeadedCommand, short_help="See one answer without drafts and with them.",
               epilog="Example: pyfly-cpp demo -m target.gguf")  # fmt: skip
@MODEL_ARGUMENT
@number("-n", "--max-tokens", kind=Int(2), default=200, help="Longest answer in tokens.")
@model_options
def command(models: Models, max_tokens: int) -> None:
    """Answer one edit prompt without drafts, then with drafts (losslessly, or by --preset), and compare."""
    drafters, reason = models.drafters()
    llm = models.load(FlyLlama, drafter=drafters.default)
    try:
        names = " and ".join(map(str, require_drafters(llm.drafter)))
        note(f"drafter: {names} ({reason})")
        note(f"--- prompt ---\n{_PROMPT}")
        _answer(llm, PLAIN, 8)  # warms up
        answers = []
        as_set = models.setting.but(adaptive=True)
        for title, setting in (("without drafts", PLAIN), ("with drafts", as_set)):
            note(f"--- {title} ---")
            answers.append(_answer(llm, setting, max_tokens, is_shown=True))
            note(f"({answers[-1][1].summary()})")
    finally:
        llm.close()
    (plain, slow), (drafted, fast) = answers
    write_sentences(f"\n{_compared(plain, drafted, slow, fast, as_set)}")


def _answer(llm: FlyLlama, setting: Decoding, max_tokens: int, is_shown: bool = False) -> tuple[str, Stats]:
    """The text, and what was counted."""
    llm.reset()
    llm.decoding = replace(setting, draft_max=0) if setting.is_plain else setting
    llm.reset_stats()
    texts, written = [], Answer()
    pieces = llm.write_chat([{"role": "user", "content": _PROMPT}], temperature=0.0, max_tokens=max_tokens)
    with reading(llm) as bar, contextlib.closing(pieces):
        for piece in pieces:
            bar.stop()
            texts.append(piece.text)
            if is_shown:
                written.write(piece.text)
    if is_shown:
        write("\n")
    return "".join(texts), llm.stats


def _compared(plain: str, drafted: str, slow: Stats, fast: Stats, setting: Decoding) -> str:
    """One sentence on texts and speeds."""
    same = "Both texts are the same"
    if plain != drafted:
        same = "The texts differ, because " + (
            "two tokens were almost equally probable and kernels round differently in batches" if setting.is_exact
            else f"the gate {setting.gate} keeps drafts that are not the model's own choice"
        )  # fmt: skip
    times = fast.tokens_per_second / slow.tokens_per_second
    if math.isnan(times):
        return f"{same}. They are too short for a speed; raise --max-tokens."
    if not fast.drafted:
        return f"{same}. Nothing was drafted: that would not be faster with this model on this machine."
    change = f"{times:.2f}x as fast" if abs(times - 1) > _LEAST_SHARE else "as fast as without them"
    return (
        f"{same}. With drafts it was {change}: {slow.tokens_per_second:.1f} and {fast.tokens_per_second:.1f} tokens/s; "
        f"{fast.acceptance:.0%} of {fast.drafted} drafts were right."
    )
