"""Keeps measurements as they come, so that a benchmark that is stopped resumes.

A file of JSON lines: what is measured, then for each start the machine and a line for each generation. It lies next to
the result, or if no result is written, in the user's folder of such files (`place`). What a killed process left of a
line is cut off. The file goes when the result is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pyfly_cpp.engine.stats import Round, Stats
from pyfly_cpp.machine.cache import state_folder
from pyfly_cpp.machine.files import OutputError, only_writer
from pyfly_cpp.measure.generator import Generated
from pyfly_cpp.measure.prompt_sets import BenchPrompt
from pyfly_cpp.measure.rows import Row, read_lines_so_far
from pyfly_cpp.measure.speed import Key, Measured

_DAYS_KEPT = 30  # in the user's folder


def place(result: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> Path:
    """The file for a benchmark: next to its result, else one of its own in the user's folder, where old ones are
    removed.

    Raises:
        OSError, RuntimeError: that folder cannot be made.
    """
    if result is not None:
        return Path(f"{os.fspath(result)}.part")
    folder = state_folder() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < time.time() - _DAYS_KEPT * 86400:
                old.unlink()
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return folder / f"{key[:32]}.part"


class Journal:
    """The measurements of one benchmark, those of earlier starts included. Nobody else writes to its file until
    `release`."""

    def __init__(
        self, path: str | os.PathLike[str], identity: Mapping[str, Any], machine: dict[str, Any], force: bool = False
    ) -> None:
        """
        Args:
            path: Of the file; need not exist.
            identity: What must be equal for measurements to stand in one table, fit for JSON.
            machine: As it is at this start, fit for JSON.
            force: Start over, whatever the file holds.

        Raises:
            OutputError: the file holds another benchmark, or something else, or another process writes to it.
        """
        self._path = Path(path)
        self.measured: dict[Key, Measured] = {}
        self.machines: list[dict[str, Any]] = []
        """The machine at each start that measured something."""
        self._machine: dict[str, Any] | None = machine
        self._lock = contextlib.ExitStack()
        try:
            self._lock.enter_context(only_writer(f"{self._path}.lock"))
        except OutputError:
            raise OutputError(
                f"another process keeps its measurements in {self._path}; wait for it, or choose another --output."
            ) from None
        try:
            self._rows = self._begin(identity, force)
        except BaseException:
            self.release()
            raise

    def _begin(self, identity: Mapping[str, Any], force: bool) -> list[Row]:
        """Opens the file; returns what it holds."""
        wanted = json.loads(_as_line(identity))
        lines, length = ([], 0) if force else read_lines_so_far(self._path)
        if not force and not lines and self._path.exists() and not _is_begun(self._path.read_bytes()):
            raise OutputError(
                f"{self._path} holds no measurements; remove it, choose another --output, or overwrite it with --force."
            )
        if lines:
            there = lines[0].get("identity")
            other = _difference(there, wanted) if isinstance(there, dict) else "something else"
            if other:
                raise OutputError(
                    f"{self._path} keeps the measurements of a benchmark that was stopped, with {other}; run that one "
                    "to its end, choose another --output, or start over with --force."
                )
        with open(self._path, "r+b" if lines else "wb") as file:
            file.truncate(length)
        if not lines:
            self._write({"identity": wanted})
        return lines[1:]

    def restore(self, prompts: Sequence[BenchPrompt]) -> int:
        """Reads back what earlier starts measured, of these prompts; returns how many generations that are. Raises
        OutputError."""
        by_id = {prompt.id: prompt for prompt in prompts}
        for row in self._rows:
            if "machine" in row:
                self.machines.append(row["machine"])
                continue
            try:
                measured = _measured(row, by_id[row["prompt"]])
            except (KeyError, TypeError, ValueError):
                raise OutputError(
                    f"{self._path} holds a line that is no measurement; remove it, choose another --output, or start "
                    "over with --force."
                ) from None
            self.measured[measured.key] = measured
        return len(self.measured)

    def add(self, measured: Measured) -> None:
        """Keeps one more."""
        if self._machine is not None:
            self.machines.append(self._machine)
            self._write({"machine": self._machine})
            self._machine = None
        self.measured[measured.key] = measured
        self._write({**measured.as_dict(), "tokens": list(measured.result.tokens)})

    def close(self) -> None:
        """The result is written: the file goes."""
        self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Lets other processes have the file; a second call does nothing."""
        self._lock.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        with open(self._path, "ab") as file:
            file.write(_as_line(row))
            file.flush()
            os.fsync(file.fileno())


def _as_line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _is_begun(content: bytes) -> bool:
    """Whether a killed process left a part of the first line here."""
    return _as_line({"identity": 0}).startswith(content[:12])


def _difference(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = [name for name in sorted({*there, *wanted}) if there.get(name) != wanted.get(name)]
    return f"other {' and '.join(names)}" if names else ""


def _measured(row: Mapping[str, Any], prompt: BenchPrompt) -> Measured:
    rounds = tuple(Round(*values) for values in zip(*(row["rounds"][field.name] for field in fields(Round))))
    result = Generated(
        row["output"], tuple(row["tokens"]), row["finish"], row["seconds_prompt"], row["decode_tokens"],
        row["decode_seconds"], Stats.read(row["stats"]), (), rounds, tuple(row["arrivals"]),
    )  # fmt: skip
    return Measured(prompt, row["turn"], row["repeat"], row["setting"], row["n_prompt"], result, row["n_parallel"])
