"""Records of the study: one JSON object a line for each item and way, in one folder.

    answers.jsonl            what is being recorded; a killed run loses at most the line it was writing
    answers-001.jsonl.xz     what was packed (`pack`): the same lines, sorted so that they compress well

Lines with `conditions` say what all others depend on; records of other conditions are refused. Lines with `pieces`
give the bytes of tokens that the lines behind them use, as Latin-1 text, so no model is needed to read the answers.
All other lines are answers, see `recording.py`.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyfly_cpp.evaluation.files import DataError, Row, read_lines_so_far
from pyfly_cpp.machine.files import only_writer, require_writable

LIVE = "answers.jsonl"
PACKED = "answers-*.jsonl.xz"


class Records:
    """The records of a folder."""

    def __init__(self, folder: Path) -> None:
        """Reads what there is; raises DataError."""
        self.folder = folder
        self.conditions: Row = {}
        self.pieces: dict[int, bytes] = {}
        self.rows: list[Row] = []
        self.prompts: dict[tuple[str, str], Any] = {}
        """The checksum of an item's prompt, by part and item."""
        self._done: set[tuple[str, str, str]] = set()
        for path in sorted(folder.glob(PACKED)):
            self._take(path, _unpacked(path))
        live, self._n_live = read_lines_so_far(folder / LIVE)
        self._take(folder / LIVE, live)

    def _take(self, path: Path, lines: Sequence[Row]) -> None:
        for line in lines:
            if "conditions" in line:
                if self.conditions not in ({}, line["conditions"]):
                    raise DataError(
                        f"{path} was recorded under other conditions than what stands beside it; part them."
                    )
                self.conditions = line["conditions"]
            elif "pieces" in line:
                self.pieces.update((int(token), text.encode("latin-1")) for token, text in line["pieces"].items())
            elif (key := key_of(line)) not in self._done:  # of one answer that is there twice, the first counts
                self._done.add(key)
                self.rows.append(line)
                self.prompts.setdefault(key[:2], line["prompt"])

    def has(self, part: str, item: str, way: str) -> bool:
        """Whether this answer is there."""
        return (part, item, way) in self._done

    @property
    def about(self) -> str:
        """The conditions, for people."""
        return "; ".join(f"{name} {value}" for name, value in self.conditions.items() if value is not None)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return b"".join(self.pieces.get(token, b"?") for token in tokens).decode("utf-8", "replace")

    @contextlib.contextmanager
    def writing(self, conditions: Row) -> Iterator[None]:
        """Opens the folder for `add`; raises DataError where it holds records of other conditions."""
        conditions = json.loads(json.dumps(conditions))
        for name in sorted({*conditions, *self.conditions} if self.conditions else ()):
            if self.conditions.get(name) != conditions.get(name):
                raise DataError(
                    f"{self.folder} holds records with other {name} ({self.conditions.get(name)}, now "
                    f"{conditions.get(name)}); name another folder."
                )
        require_writable(self.folder)
        with only_writer(self.folder / ".lock"), open(self.folder / LIVE, "ab") as self._file:
            self._file.truncate(self._n_live)  # what a killed run left of its last line
            if self._n_live == 0:
                self._write({"conditions": conditions})
            self.conditions = conditions
            yield

    def add(self, row: Row, pieces: dict[int, bytes]) -> None:
        """Appends an answer; `pieces`: the bytes of its tokens."""
        new = {token: piece for token, piece in pieces.items() if token not in self.pieces}
        if new:
            self._write({"pieces": {str(token): piece.decode("latin-1") for token, piece in new.items()}})
            self.pieces.update(new)
        self._write(row)
        self._take(self.folder / LIVE, [row])

    def _write(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())


def key_of(row: Row) -> tuple[str, str, str]:
    """What an answer is of: part, item and way."""
    return row["part"], row["item"], row["way"]


def pack(folder: Path) -> Path | None:
    """Moves the lines of answers.jsonl to a compressed file of their own; returns it, None where there are none."""
    with only_writer(folder / ".lock"):
        lines, _ = read_lines_so_far(folder / LIVE)
        heads = [line for line in lines if "conditions" in line or "pieces" in line]
        answers = sorted((line for line in lines if "way" in line), key=key_of)
        if not answers:
            return None
        n = len(list(folder.glob(PACKED))) + 1
        path = folder / PACKED.replace("*", f"{n:03}")
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
            file.write(lzma.compress(b"".join(map(_line, [*heads, *answers])), preset=9 | lzma.PRESET_EXTREME))
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
        (folder / LIVE).unlink()  # after a kill before this, both are read, and the first of each answer counts
        return path


def _line(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n"


def _unpacked(path: Path) -> list[Row]:
    try:
        return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read ({error}); take it out of the folder, or get it again.") from None


def loose_of(row: Row) -> list[dict[str, Any]]:
    """The loose accepts of an answer by the names of LOOSE."""
    return [dict(zip(LOOSE, entry)) for entry in row["loose"]]


LOOSE = ("place", "token", "choice", "margin", "entropy", "p")
"""Of a loose accept: its place in the answer, from 0; what was accepted; what the target had chosen; ln p(choice) -
ln p(token) and the entropy that the rule measures, nats; p(token)."""
