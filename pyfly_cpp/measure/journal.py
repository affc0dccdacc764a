"""Keeps measurements as they come, so that what is stopped resumes.

A line of JSON is written whole and flushed before the next generation begins; what a killed process left of one is cut
off. What was begun under other conditions is refused.

- A benchmark has one file: what is measured, then for each start the machine and a line for each generation. It lies
  next to the result, or if no result is written, in the user's folder of such files (`place`). The file goes when the
  result is there.
- The run of a task is a folder: `run.json` describes it, `items.jsonl` has one line for each item and setting,
  `table.json` and `table.md` are written at the end.
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

from pyfly_cpp.engine.stats import Stats, Step
from pyfly_cpp.machine.cache import kept_path
from pyfly_cpp.machine.files import OutputError, only_writer, resumable, write_atomically
from pyfly_cpp.machine.prompt_sets import BenchPrompt
from pyfly_cpp.machine.rows import Row, read_lines_so_far
from pyfly_cpp.measure.generator import Generated
from pyfly_cpp.measure.speed import Key, Measured

_DAYS_KEPT = 30  # in the user's folder


class Lines:
    """A file of JSON lines that grows, and what it held when it was opened."""

    def __init__(self, path: Path, force: bool = False) -> None:
        """`force`: begins anew. Raises DataError if somebody else wrote into the file."""
        self._path = path
        self.rows, length = ([], 0) if force else read_lines_so_far(path)
        if path.exists():
            os.truncate(path, length)

    def append(self, row: Mapping[str, Any]) -> Row:
        """Returns the row as a later start will read it. Raises OutputError if the disk is full."""
        with resumable(self._path):
            return self.begin(row)

    def begin(self, row: Mapping[str, Any]) -> Row:
        """Appends the first row, of a run that may go without the file: a full disk is an OSError."""
        line = _as_line(row)
        with open(self._path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        return dict(json.loads(line))


def _differing(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names of conditions that are not equal."""
    return [name for name in sorted({*there, *wanted}) if there.get(name) != wanted.get(name)]


def place(result: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> Path:
    """The file for a benchmark: next to its result, else one of its own in the user's folder, where old ones are
    removed.

    Raises:
        OSError, RuntimeError: that folder cannot be made.
    """
    if result is not None:
        return Path(f"{os.fspath(result)}.part")
    folder = kept_path("bench")
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
            self._lines = self._begin(identity, force)
        except BaseException:
            self.release()
            raise

    def _begin(self, identity: Mapping[str, Any], force: bool) -> Lines:
        """Opens the file."""
        wanted = json.loads(_as_line(identity))
        there = [] if force else read_lines_so_far(self._path)[0]
        if not force and not there and self._path.exists() and not _is_begun(self._path.read_bytes()):
            raise OutputError(
                f"{self._path} holds no measurements; remove it, choose another --output, or overwrite it with --force."
            )
        if there:
            known = there[0].get("identity")
            names = _differing(known, wanted) if isinstance(known, dict) else []
            if names or not isinstance(known, dict):
                other = f"other {' and '.join(names)}" if names else "something else"
                raise OutputError(
                    f"{self._path} keeps the measurements of a benchmark that was stopped, with {other}; run that one "
                    "to its end, choose another --output, or start over with --force."
                )
        lines = Lines(self._path, force)
        if not there:
            lines.begin({"identity": wanted})
        return lines

    def restore(self, prompts: Sequence[BenchPrompt]) -> int:
        """Reads back what earlier starts measured, of these prompts; returns how many generations that are. Raises
        OutputError."""
        by_id = {prompt.id: prompt for prompt in prompts}
        for row in self._lines.rows[1:]:
            if "machine" in row:
                self.machines.append(row["machine"])
                continue
            try:
                measured = _measured(row, by_id[row["prompt"]])
            except (KeyError, TypeError, ValueError):
                raise OutputError(
                    f"{self._path} has a line that is not a measurement; remove it, choose another --output, or start "
                    "over with --force."
                ) from None
            self.measured[measured.key] = measured
        return len(self.measured)

    def add(self, measured: Measured) -> None:
        """Keeps one more."""
        if self._machine is not None:
            self.machines.append(self._machine)
            self._lines.append({"machine": self._machine})
            self._machine = None
        self.measured[measured.key] = measured
        self._lines.append({**measured.as_dict(), "tokens": list(measured.result.tokens)})

    def close(self) -> None:
        """The result is written: the file goes."""
        self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Lets other processes have the file; a second call does nothing."""
        self._lock.close()


def _as_line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _is_begun(content: bytes) -> bool:
    """Whether a killed process left a part of the first line here."""
    return _as_line({"identity": 0}).startswith(content[:12])


def _measured(row: Mapping[str, Any], prompt: BenchPrompt) -> Measured:
    steps = tuple(Step(*values) for values in zip(*(row["rounds"][field.name] for field in fields(Step))))
    result = Generated(
        row["output"], tuple(row["tokens"]), row["finish"], row["seconds_prompt"], row["decode_tokens"],
        row["decode_seconds"], Stats.read(row["stats"]), (), steps, tuple(row["arrivals"]),
    )  # fmt: skip
    return Measured(prompt, row["turn"], row["repeat"], row["setting"], row["n_prompt"], result, row["n_parallel"])


# ---- Runs of tasks ---------------------------------------------------------------------------------------------------

RUN, ITEMS, TABLE_JSON, TABLE_MARKDOWN = "run.json", "items.jsonl", "table.json", "table.md"


def read_run(folder: Path) -> dict[str, Any] | None:
    """What `run.json` says of the run in a folder: `identity` and `sessions`; None if there is none. Raises OutputError
    if it is something else."""
    if not (folder / RUN).exists():
        return None
    try:
        known = json.loads((folder / RUN).read_text(encoding="utf-8"))
        return {"identity": dict(known["identity"]), "sessions": [dict(one) for one in known["sessions"]]}
    except (ValueError, KeyError, TypeError):
        raise OutputError(f"{folder / RUN} was not written by this program; give an empty or a new folder.") from None


def starts(folder: Path) -> list[dict[str, Any]]:
    """The machine as it was at each start that made lines of the run in a folder."""
    known = read_run(folder)
    return [] if known is None else list(known["sessions"])


def open_run(
    path: Path, identity: Mapping[str, Any], n_lines: int, force: bool, machine: Mapping[str, Any] | None
) -> Lines:
    """The lines of the run in a folder, of which there will be n_lines; afterwards run.json is there.

    Raises:
        OutputError: it holds another run, or other files.
    """
    identity = dict(json.loads(json.dumps(identity)))
    others = sorted(entry.name for entry in path.iterdir() if entry.name != RUN and not entry.name.startswith("."))
    sessions: list[Any] = []
    known = read_run(path)
    if known is not None and force:
        for name in (ITEMS, TABLE_JSON, TABLE_MARKDOWN, RUN):
            (path / name).unlink(missing_ok=True)
    elif known is not None:
        _require_same(path, known["identity"], identity)
        sessions = known["sessions"]
    elif others:
        raise OutputError(f"{path} is not the folder of a run, but holds {others[0]}; give an empty or a new one.")
    lines = Lines(path / ITEMS)
    n_there = len(lines.rows)
    sessions = [one for one in sessions if one.get("lines_before") != n_there]  # without those that made none
    if n_there < n_lines:
        sessions.append({**(machine or {}), "lines_before": n_there})
    record = {"format": 1, "identity": identity, "sessions": sessions}
    write_atomically(path / RUN, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return lines


def _require_same(path: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in _differing(there, wanted):
        raise OutputError(
            f"{path} holds a run with other {name} ({_brief(there.get(name))}, now {_brief(wanted.get(name))}); "
            "choose another --output, or start over with --force."
        )


def _brief(value: Any) -> str:
    text = (
        f"{len(value)} of them" if isinstance(value, list) and len(value) > 4 else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= 160 else text[:157] + "..."
