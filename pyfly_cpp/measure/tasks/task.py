"""An evaluation task: rows in, chat messages out, a verdict on an output. One file per task implements it.

A task owns no model and does no I/O beyond reading its rows; scoring an output needs nothing but the item and the text,
so that saved outputs can be scored again.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyfly_cpp.machine.rows import DataError, Row, Where, read_jsonl, unique
from pyfly_cpp.measure.tasks.data_sets import HubSplit, load_rows

Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """One row of a task."""

    id: str
    """Unique in its file."""
    fields: dict[str, Any]
    """The data that the task needs of the row, checked."""
    group: str = ""
    """Items of one group are not independent (one prompt in several forms): resampling takes groups. Empty: the id."""

    @classmethod
    def of(cls, where: Where, fields: dict[str, Any], group: str | None = None) -> Item:
        """The item of a row with these fields; `group`: the field that names its group, if it is there."""
        return cls(where.text("id"), fields, where.text(group) if group in where.row else "")

    @property
    def unit(self) -> str:
        """A unit that is independent of others: the group, or the item itself."""
        return self.group or self.id


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
