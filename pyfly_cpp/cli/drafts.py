"""Shows how each token of an answer came, as Figure 4 of the FLy paper (arXiv 2511.22972) does."""

from __future__ import annotations

import os
import sys

import click

from pyfly_cpp.cli.terminal import is_dumb, shown
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.llama.fly_llama import FlyLlama

_COLOURS = {
    "matched": {"fg": "green"},
    "loose": {"fg": "yellow", "bold": True, "underline": True},
    "target": {},
    "rejected": {"fg": "red", "dim": True, "strikethrough": True},
}
_MARKS = {"matched": ("", ""), "loose": ("{+", "+}"), "target": ("<", ">"), "rejected": ("[-", "-]")}
_WORDS = {
    "matched": "drafted, the target's choice",
    "loose": "drafted, loosely accepted",
    "target": "the target's own",
    "rejected": "rejected draft",
}


def use_colour() -> bool:
    """Whether the answers' stdout is a terminal with colours."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and not is_dumb()


def paint(text: str, how: str, colour: bool) -> str:
    """Text for stdout, marked by how it came: `Record.origin`, or "rejected"."""
    if not text:
        return ""
    text = shown(text, sys.stdout)
    if colour:
        return click.style(text, **_COLOURS[how])  # type: ignore[arg-type]
    begin, end = _MARKS[how]
    return f"{begin}{text}{end}"


def legend(colour: bool) -> str:
    """The meaning of the colours, or of the marks."""
    return "tokens: " + ", ".join(paint(words, how, colour) for how, words in _WORDS.items())


def marked(llm: FlyLlama, piece: Piece, colour: bool) -> str:
    """A piece of an answer whose tokens have records, for stdout: each token as it came, behind the drafts that were
    rejected in its place."""
    out = []
    for token in piece.tokens:
        assert token.record is not None
        for rejected in token.record.rejected:
            draft = llm.detokenize([rejected], prev_tokens=[rejected], special=True)
            out.append(paint(draft.decode("utf-8", errors="replace").replace("\n", "\u21b5"), "rejected", colour))
        out.append(paint(token.text, token.record.origin, colour))
    return "".join(out)
