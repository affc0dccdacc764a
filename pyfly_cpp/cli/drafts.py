"""Shows how each token of an answer came, as Figure 4 of the FLy paper (arXiv 2511.22972) does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import click

from pyfly_cpp.cli.terminal import shown
from pyfly_cpp.engine.output import Characters
from pyfly_cpp.engine.stats import Record
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
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


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
    """What the colours, or the marks, mean."""
    return "tokens: " + ", ".join(paint(words, how, colour) for how, words in _WORDS.items())


class DraftView:
    """Writes one answer from the records of its tokens, as far as the answer's text has been streamed."""

    def __init__(self, llm: FlyLlama, write: Callable[[str], None], colour: bool) -> None:
        self._llm, self._write, self._colour = llm, write, colour
        self._characters = Characters(lambda token: llm.detokenize([token], prev_tokens=[token]))
        self._waiting: list[tuple[str, str]] = []  # text and how it came
        self._n_seen = 0  # records
        self._n_room = 0  # characters streamed and not yet written

    def feed(self, text: str) -> None:
        """Writes the next text of the answer."""
        self._n_room += len(text)
        records: Sequence[Record] = self._llm.records
        for record in records[self._n_seen :]:
            for token in record.rejected:
                piece = self._llm.detokenize([token], prev_tokens=[token], special=True)
                self._waiting.append((piece.decode("utf-8", errors="replace").replace("\n", "\u21b5"), "rejected"))
            self._waiting.append((self._characters(record.token), record.origin))
        self._n_seen = len(records)
        # A rejected draft is written together with the token in its place.
        while any(how != "rejected" for _, how in self._waiting):
            i = next(i for i, (_, how) in enumerate(self._waiting) if how != "rejected")
            if len(self._waiting[i][0]) > self._n_room:
                return
            self._n_room -= len(self._waiting[i][0])
            for piece_text, how in self._waiting[: i + 1]:
                self._write(paint(piece_text, how, self._colour))
            del self._waiting[: i + 1]

    def finish(self) -> None:
        """Writes what is left of the streamed text: a token that the answer ends in the middle of."""
        for text, how in self._waiting:
            if how != "rejected" and self._n_room > 0:
                self._write(paint(text[: self._n_room], how, self._colour))
                self._n_room -= len(text)
        self._waiting = []
