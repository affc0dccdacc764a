"""Reading JSONL without losing a row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class DataError(ValueError):
    """A data file is missing, unreadable or malformed; the message names file, line and field."""


def read_jsonl(path: str | os.PathLike[str]) -> list[tuple[int, Row]]:
    """All rows of a JSONL file (UTF-8, one object a line) with their 1-based line numbers; blank lines are not rows.

    Raises:
        DataError: the file cannot be read, has no rows, or a line is no JSON object.
    """
    name = os.fspath(path)
    rows: list[tuple[int, Row]] = []
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
            f"{name}, line {number}: half of a surrogate pair (\\ud800 ...) is not text; remove it."
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
