"""An evaluation task: rows in, chat messages out, a verdict on an output. One file per task implements it.

A task owns no model and does no I/O beyond reading its rows; scoring an output needs nothing but the item and the text,
so that saved outputs can be scored again.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heapreplace
from typing import Any, Protocol, TypeVar

from pyfly_cpp.measure.rows import DataError, Row, read_jsonl
from pyfly_cpp.measure.tasks.data_sets import HubSplit, load_rows

Message = dict[str, str]
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Item:
    """One row of a task."""

    id: str
    """Unique in its file."""
    fields: dict[str, Any]
    """The data that the task needs of the row, checked."""
    group: str = ""
    """Items of one group are not independent (one prompt in several forms): resampling takes groups. Empty: the id."""

    @property
    def unit(self) -> str:
        """A unit that is independent of others: the group, or the item itself."""
        return self.group or self.id


def spread(
    entries: Sequence[_Entry], n: int | None, kind: Callable[[_Entry], str], group: Callable[[_Entry], str]
) -> list[_Entry]:
    """At most n entries (None: all), evenly over their kinds, one of each in turn, and within a kind those first of
    whose group fewest were taken; kept in their order."""
    if n is None or n >= len(entries):
        return list(entries)
    left: dict[str, list[tuple[int, int]]] = {}  # heaps of how many were taken of its group, when last looked at; index
    for i, entry in enumerate(entries):
        left.setdefault(kind(entry), []).append((0, i))
    taken: Counter[str] = Counter()
    chosen: list[int] = []
    while len(chosen) < n:
        for heap in [heap for heap in left.values() if heap][: n - len(chosen)]:
            while (count := taken[group(entries[heap[0][1]])]) > heap[0][0]:
                heapreplace(heap, (count, heap[0][1]))
            _, fewest = heappop(heap)
            taken[group(entries[fewest])] += 1
            chosen.append(fewest)
    return [entries[i] for i in sorted(chosen)]


@dataclass(frozen=True)
class Where:
    """One row of a data file and where it stands."""

    path: str
    line: int
    row: Row

    def text(self, name: str, empty: bool = False) -> str:
        """A required text, which may be empty if `empty`. Raises DataError, as the others do."""
        value = self._value(name, str, "a text")
        if not (empty or value.strip()):
            raise self.error(f"the field {name!r} is empty.")
        return str(value)

    def texts(self, name: str, empty: bool = False) -> list[str]:
        """A required list of texts."""
        value = self._value(name, list, "a list of texts")
        if not (empty or value):
            raise self.error(f"the field {name!r} is empty.")
        return list(value)

    def fields(self, *names: str, optional: Sequence[str] = ()) -> dict[str, Any]:
        """Required texts by their names, and those of others that are there."""
        return {name: self.text(name) for name in (*names, *(name for name in optional if name in self.row))}

    def item(self, fields: dict[str, Any], group: str | None = None) -> Item:
        """The item of the row with these fields; `group`: the field that names its group, if it is there."""
        return Item(self.text("id"), fields, self.text(group) if group in self.row else "")

    def integer(self, name: str) -> int:
        """A required integer."""
        return int(self._value(name, int, "an integer"))

    def _value(self, name: str, kind: type, words: str) -> Any:
        if name not in self.row:
            raise self.error(f"the field {name!r} is missing (it has {', '.join(sorted(self.row)) or 'none'}).")
        value = self.row[name]
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or (kind is list and not all(isinstance(entry, str) for entry in value)):
            raise self.error(f"the field {name!r} must be {words}, not {json.dumps(value)[:60]}.")
        return value

    def error(self, what: str) -> DataError:
        """The error that names the fault `what` of this row."""
        return DataError(f"{self.path}, line {self.line}: {what}")


@dataclass(frozen=True)
class Verdict:
    """How an output was judged."""

    correct: bool
    """By the task's main criterion."""
    extracted: str
    """The part of the output that was judged; empty if nothing could be."""
    expected: str
    """The right answer."""
    detail: dict[str, Any] = field(default_factory=dict)
    """Other criteria and reasons, by name."""


class _Named(Protocol):
    @property
    def id(self) -> str: ...


_AnyNamed = TypeVar("_AnyNamed", bound=_Named)


def unique(entries: Iterable[tuple[Where, _AnyNamed]]) -> list[_AnyNamed]:
    """The items read from rows; raises DataError if two have one id."""
    out: dict[str, _AnyNamed] = {}
    lines: dict[str, int] = {}
    for where, entry in entries:
        if entry.id in out:
            raise where.error(f"the id {entry.id!r} is that of line {lines[entry.id]} already; make the ids unique.")
        out[entry.id], lines[entry.id] = entry, where.line
    return list(out.values())


UNJUDGED = "unjudged"
"""In the detail of a verdict: why the task could not judge the output."""


class Task(ABC):
    """A task. Implementations are stateless."""

    name: str
    """As on the command line."""
    title: str
    """One line for people: what is asked, and by whose convention."""
    max_tokens: int
    """Default limit of an answer."""
    few_shot: int = 0
    """Worked examples in the prompt by the task's convention, if a file of examples is given."""
    runs_code: bool = False
    """Whether scoring executes what the model wrote."""
    criterion: str = "correct"
    """What `Verdict.correct` means, for the head of a table's column."""
    hub: tuple[HubSplit, ...] = ()
    """Where its rows are on the hub; empty if they are not there."""
    hub_examples: HubSplit | None = None
    """The same of worked examples."""

    @abstractmethod
    def parse(self, where: Where) -> Item:
        """One row of a data file, its fields checked. Raises DataError with file, line and field."""

    def require(self) -> None:  # noqa: B027 - most tasks need nothing
        """Before any work: that outputs can be judged here. Raises an error that names what is missing."""

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        """A row of the hub, in the form of a data file's. Raises DataError."""
        raise NotImplementedError(f"{self.name} names no split of the hub")

    def question(self, item: Item) -> str:
        """The user's message: the field `prompt`, unless the task has other words."""
        return str(item.fields["prompt"])

    @abstractmethod
    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Judges an output, given as text (without `prefix`) and as the target's tokens. Executes it if `runs_code`."""

    def worked_answer(self, item: Item) -> str:
        """The assistant's answer if `item` is a worked example."""
        raise DataError(f"the task {self.name} has no worked examples; leave out --examples.")

    def prefix(self, item: Item) -> str:
        """How the assistant's answer begins; put into its mouth (`gen_prefix` of lm-evaluation-harness)."""
        return ""

    def stop(self, item: Item) -> list[str]:
        """Texts that end an answer; they are not part of it."""
        return []

    def pick_examples(self, item: Item, examples: Sequence[Item], n: int) -> list[Item]:
        """The n worked examples before `item`: the first ones of their file, for every item the same."""
        return list(examples[:n])

    def kind(self, item: Item) -> str:
        """What a part of the items is spread over: its group, unless the task has more."""
        return item.unit

    def read(self, path: str | os.PathLike[str]) -> list[Item]:
        """All rows of a data file (JSONL). Raises DataError with file, line and field; never skips a row."""
        return self._read(Where(os.fspath(path), number, row) for number, row in read_jsonl(path))

    def read_hub(self, examples: bool = False) -> list[Item]:
        """The same from the hub: the items, or the worked examples. Raises DataError, also if there are none."""
        splits = self.hub if not examples else () if self.hub_examples is None else (self.hub_examples,)
        what, option = ("worked examples", "--examples") if examples else ("items", "--data")
        if not splits:
            raise DataError(f"the task {self.name} needs its {what}; give a JSONL file with {option}.")
        return self._read(
            Where(str(split), number, self.from_hub(split, Where(str(split), number, row)))
            for split, rows in load_rows(self.name, splits, option)
            for number, row in enumerate(rows, 1)
        )

    def _read(self, rows: Iterable[Where]) -> list[Item]:
        return unique((where, self.parse(where)) for where in rows)

    def messages(self, item: Item, examples: Sequence[Item] = ()) -> list[Message]:
        """The chat messages that ask `item`; worked examples are turns of the chat before it
        (`--fewshot_as_multiturn` of lm-evaluation-harness)."""
        messages: list[Message] = []
        for example in examples:
            messages.append({"role": "user", "content": self.question(example)})
            messages.append({"role": "assistant", "content": self.worked_answer(example)})
        return [*messages, {"role": "user", "content": self.question(item)}]
