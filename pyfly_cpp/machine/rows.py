"""Rows of JSONL: reading without losing one, what stands in them, and choosing some."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pyfly_cpp.machine.files import is_stream

Row = dict[str, Any]
_Entry = TypeVar("_Entry")


class DataError(ValueError):
    """A data file is missing, unreadable or malformed; the message names file, line and field."""


def read_jsonl(path: str | os.PathLike[str]) -> list[tuple[int, Row]]:
    """All rows of a JSONL file (UTF-8, one object a line) with their 1-based line numbers; blank lines are not rows.

    Raises:
        DataError: the file cannot be read, has no rows, or a line is no JSON object.
    """
    name = os.fspath(path)
    rows: list[tuple[int, Row]] = []
    if is_stream(path):  # it can be read once, and its hash is read as well
        raise DataError(f"{name} is a device or a pipe; give the path of a JSONL file.")
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append((number, _parse(name, number, line)))
    except IsADirectoryError:
        raise DataError(f"{name} is a folder; give the path of a JSONL file in it.") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror}); check the path.") from None
    if not rows:
        raise DataError(f"{name} has no rows; give a JSONL file with one object a line.")
    return rows


def _parse(name: str, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        if rb"\u" in line:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{name}, line {number}: half of a surrogate pair (such as \\ud800) is not valid text; remove it."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name}, line {number}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}, line {number}: not JSON ({error}); write one object a line.") from None
    if not isinstance(row, dict):
        raise DataError(f"{name}, line {number}: a {type(row).__name__}, not an object; write one object a line.")
    return row


def read_lines_so_far(path: Path) -> tuple[list[Row], int]:
    """The complete rows of a JSONL file that was being appended to, and the length in bytes of what they take.

    What a killed writer left of its last line is not among them; truncate the file to the length before appending.

    Raises:
        DataError: a line before the last is no JSON object: somebody else wrote into the file.
    """
    rows: list[Row] = []
    length = 0
    if not path.exists():
        return rows, length
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(_parse(str(path), number, line))
        except DataError:
            if any(rest.strip(b"\0\n ") for rest in lines[number:]):
                raise
            break  # blocks that a power cut left unwritten
        length += len(line) + 1
    return rows, length


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
