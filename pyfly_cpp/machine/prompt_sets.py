"""Prompt sets: a small one of our own, any JSONL, and Spec-Bench's format.

A row has a `prompt` (text) or `turns` (texts, one after the other in one conversation). If present, `id`,
`category` and `prompt_id` (the same in rows that are forms of one prompt) are used.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

from pyfly_cpp.machine.files import file_text
from pyfly_cpp.machine.rows import DataError, Where, read_jsonl, spread, unique

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""Twelve prompts of six kinds, written for this package."""


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation."""

    id: str
    category: str
    """Empty if the row names none."""
    turns: tuple[str, ...]
    """The user's messages, turn by turn."""
    group: str = ""
    """Prompts of one group are forms of one prompt, and not independent; empty: this one stands alone."""

    @property
    def unit(self) -> str:
        """A unit that is independent of others: the group, or the prompt itself."""
        return self.group or self.id


def read_prompts(path: str | os.PathLike[str] = BUILT_IN) -> list[BenchPrompt]:
    """All prompts of a file, in its order; in a .txt file, each line is one.

    Raises DataError with file, line and field; never skips a row."""
    if os.fspath(path).endswith(".txt"):
        return [BenchPrompt(f"{i}", "", (line,)) for i, line in _lines(Path(path))]
    rows = [Where(os.fspath(path), line, row) for line, row in read_jsonl(path)]
    return unique((where, _read(where)) for where in rows)


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    try:
        text = io.StringIO(file_text(path), newline=None)
    except ValueError as error:
        raise DataError(str(error)) from None
    lines = [(i, line.strip()) for i, line in enumerate(text, 1) if line.strip()]
    if not lines:
        raise DataError(f"{path} has no prompts; write one in each line.")
    return lines


def _read(where: Where) -> BenchPrompt:
    row = where.row
    if "turns" in row:
        turns = where.texts("turns")
        if not all(turn.strip() for turn in turns):
            raise where.error("the field 'turns' has an empty text.")
    elif "prompt" in row:
        turns = [where.text("prompt")]
    else:
        raise where.error(f"neither 'prompt' nor 'turns' is given (fields: {', '.join(sorted(row)) or 'none'}).")
    name = f"{where.line}"
    if "id" in row:
        name = f"{where.integer('id')}" if type(row["id"]) is int else where.text("id")
    more = [where.text(name, empty=True) if row.get(name) is not None else "" for name in _OPTIONAL]
    return BenchPrompt(name, more[0], tuple(turns), *more[1:])


_OPTIONAL = ("category", "prompt_id")


def pick_prompts(prompts: list[BenchPrompt], n: int | None) -> list[BenchPrompt]:
    """At most n prompts, evenly over the categories, and within one over the groups."""
    return spread(prompts, n, lambda prompt: prompt.category, lambda prompt: prompt.unit)
