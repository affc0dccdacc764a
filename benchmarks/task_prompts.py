"""The prompts of `prompts/`: what people do, by kind (prompts/README.md)."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyfly_cpp.machine.rows import Where, read_jsonl, unique

FOLDER = Path(__file__).parent / "prompts"

GROUPS = {
    "edits": ("spelling", "edit", "convert", "extract"),
    "summaries": ("summary-2k", "summary-8k"),
    "code": ("code", "tests", "agent"),
    "chat": ("chat", "explain", "maths", "translate"),
    "stories": ("story",),
}
"""The rows of README's table, each with its kinds: all there are."""

KINDS = tuple(kind for kinds in GROUPS.values() for kind in kinds)


@dataclass(frozen=True)
class TaskPrompt:
    """A conversation whose next message is asked for."""

    id: str
    kind: str
    held_out: bool
    """Never used to choose anything."""
    messages: list[dict[str, Any]]
    """In the form of OpenAI's protocol, but the arguments of tool calls are objects, as chat templates take them."""
    tools: list[dict[str, Any]] | None = None


def read_kind(kind: str) -> list[TaskPrompt]:
    """All of one kind, in their order. Raises DataError with file, line and field."""
    path = FOLDER / f"{kind}.jsonl"
    return unique((where, _read(where, kind)) for where in (Where(str(path), *one) for one in read_jsonl(path)))


def pick(kinds: Sequence[str], per_kind: int) -> list[TaskPrompt]:
    """The first so many of each kind. One in two is held out, the first one included."""
    return [prompt for kind in kinds for prompt in read_kind(kind)[:per_kind]]


@functools.lru_cache(maxsize=1)
def documents() -> dict[str, str]:
    """The texts that prompts name."""
    with gzip.open(FOLDER / "documents.jsonl.gz", "rt", encoding="utf-8") as file:
        return {row["name"]: row["text"] for row in map(json.loads, file)}


def _read(where: Where, kind: str) -> TaskPrompt:
    row = where.row
    if not isinstance(row.get("held_out"), bool):
        raise where.error("the field 'held_out' must be true or false.")
    if "messages" in row:
        return TaskPrompt(
            where.text("id"), kind, row["held_out"], [*map(_for_template, row["messages"])], row.get("tools")
        )
    text = where.text("prompt")
    if "document" in row:
        name = where.text("document")
        if name not in documents():
            raise where.error(f"there is no document {name!r}; documents.jsonl.gz has {', '.join(documents())}.")
        text = text.replace("{document}", documents()[name])
    return TaskPrompt(where.text("id"), kind, row["held_out"], [{"role": "user", "content": text}])


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
