"""What several scripts have in common: a results file that a run appends to, prompts, tables.

The file is JSONL. Its first line says what every other line depends on (models, lengths); a run with other conditions
is refused. Files of the same conditions may be joined with cat. Every result is a line of its own, written whole and
flushed before the next generation begins, so a run can be stopped at any moment (or by --minutes) and started again: it
skips what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyfly_cpp.bench.prompts import BenchPrompt, read_prompts
from pyfly_cpp.evaluation.files import Row, field, read_jsonl, read_lines_so_far
from pyfly_cpp.machine.files import only_writer


def read_questions(path: Path) -> list[BenchPrompt]:
    """As read_prompts; rows with a `question` (the evaluation's data files) are asked that, with their `choices`."""
    rows = read_jsonl(path)
    if "question" not in rows[0][1]:
        return read_prompts(path)
    prompts = []
    for line, row in rows:
        lines = [field(path, line, row, "question")]
        lines += [f"{letter}) {text}" for letter, text in zip("ABCDE", row.get("choices") or ())]
        prompts.append(BenchPrompt(field(path, line, row, "id"), "", ("\n".join(lines),)))
    return prompts


class Results:
    """The lines of a results file, by what they are about."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read()

    def _read(self) -> None:
        lines, self._length = read_lines_so_far(self.path)
        conditions = [line["conditions"] for line in lines if "conditions" in line]
        self.conditions: Row = conditions[0] if conditions else {}
        if any(other != self.conditions for other in conditions):
            raise SystemExit(f"{self.path} holds results of different conditions, which do not belong into one table.")
        self.rows: list[Row] = [line for line in lines if "prompt" in line]
        self.left_out: list[Row] = [line for line in lines if "left_out" in line]

    @classmethod
    def measured(cls, path: Path) -> Results:
        """Those of a file that has some, for a table."""
        results = cls(path)
        if not results.rows:
            raise SystemExit(f"{path} has no results yet.")
        return results

    @contextlib.contextmanager
    def writing(self, conditions: Row) -> Iterator[None]:
        """Opens the file for `add`; refuses one of other conditions."""
        with only_writer(self.path.with_suffix(".lock")):
            self._read()  # another run may have added to it
            if self.conditions and self.conditions != conditions:
                raise SystemExit(
                    f"{self.path} holds results of {self.conditions}, not {conditions}; name another --out."
                )
            with open(self.path, "ab") as self._file:
                self._file.truncate(self._length)  # what a killed run left of its last line
                if not self.conditions:
                    self.conditions = conditions
                    self._write({"conditions": conditions})
                yield

    def add(self, row: Row) -> None:
        """Appends a result."""
        self._write(row)
        (self.rows if "prompt" in row else self.left_out).append(row)

    def _write(self, row: Row) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def model_conditions(args: argparse.Namespace) -> Row:
    """What makes two runs runs of the same models."""
    files = {"target": args.target, "draft": args.draft}
    return {name: f"{Path(file).name} ({Path(file).stat().st_size} bytes)" for name, file in files.items() if file}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column aligned to the left."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
