"""Prompt sets: a small one of our own, any JSONL, and Spec-Bench's format.

A row has a `prompt` (text) or `turns` (texts, one after the other in one conversation). Where they are there, `id`,
`category`, `prompt_id` (the same in rows that are forms of one prompt) and, by tuning, `answer` (a text that a right
output contains) are used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pyfly_cpp.evaluation.files import DataError, field, read_jsonl
from pyfly_cpp.evaluation.task import spread

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""Twelve prompts of six kinds, written for this package."""


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation."""

    id: str
    category: str
    """Empty if the row names none."""
    turns: tuple[str, ...]
    """What the user says, turn by turn."""
    answer: str = ""
    """What a right output contains; empty if it is not known."""
    group: str = ""
    """Prompts of one group are forms of one prompt, and not independent; empty: this one stands alone."""

    @property
    def unit(self) -> str:
        """What is independent of other units: the group, or the prompt itself."""
        return self.group or self.id


def read_prompts(path: str | os.PathLike[str] = BUILT_IN) -> list[BenchPrompt]:
    """All prompts of a file, in its order. Raises DataError with file, line and field; never skips a row."""
    prompts = []
    seen: dict[str, int] = {}
    for line, row in read_jsonl(path):
        if "turns" in row:
            turns = tuple(field(path, line, row, "turns", list))
            if not all(turn.strip() for turn in turns):
                raise DataError(f"{os.fspath(path)}, line {line}: the field 'turns' has an empty text.")
        elif "prompt" in row:
            turns = (field(path, line, row, "prompt"),)
        else:
            raise DataError(
                f"{os.fspath(path)}, line {line}: neither 'prompt' nor 'turns' is there (it has "
                f"{', '.join(sorted(row)) or 'no fields'})."
            )
        name = (
            str(field(path, line, row, "id", type(row["id"]) if type(row["id"]) is int else str))
            if "id" in row
            else f"{line}"
        )
        if name in seen:
            raise DataError(f"{os.fspath(path)}, line {line}: the id {name!r} is that of line {seen[name]} already.")
        seen[name] = line
        category = field(path, line, row, "category", empty=True) if row.get("category") is not None else ""
        answer = field(path, line, row, "answer", empty=True) if row.get("answer") is not None else ""
        group = field(path, line, row, "prompt_id", empty=True) if row.get("prompt_id") is not None else ""
        prompts.append(BenchPrompt(name, category, turns, answer, group))
    return prompts


def pick_prompts(prompts: list[BenchPrompt], n: int | None) -> list[BenchPrompt]:
    """At most n prompts, evenly over the categories, and within one over the groups."""
    return spread(prompts, n, lambda prompt: prompt.category, lambda prompt: prompt.unit)
