"""The process that reads grammars, as the server sees it: started, started again, asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_MOST_SENT = 2
"""Times that a constraint is sent: the process may have ended by something else."""
_LONGEST_PAUSE = 60.0
_PATIENCE = 50.0
"""Seconds that are waited for a reader, which may have to wait for others: less than proxies wait for a head."""


class Unavailable(RuntimeError):
    """The process that reads grammars does not start."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
        """When it is started again."""


@dataclass
class _Asked:
    """A constraint that somebody waits for."""

    line: dict[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    process: subprocess.Popen[str] | None = None
    """The one that it was sent to."""
    n_sent: int = 0


class GrammarReaders:
    """Asks `_process` and keeps it running. It belongs to one event loop."""

    def __init__(self, model_path: str, max_bytes: int) -> None:
        """
        Args:
            model_path: The file of the vocabulary that grammars are tried with.
            max_bytes: Most bytes of a grammar.
        """
        self._path = model_path
        self._max_bytes = max_bytes
        self._file = _held(model_path)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # of the process
        self._is_closed = False
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="pyfly-grammars")
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count()
        self._n_failures = 0
        """Starts that failed, one after the other."""
        self._earliest = 0.0
        """No start before this time."""

    def start(self) -> None:
        """Makes the process ready, in the background."""
        self._post(None)

    async def read(self, constraint: dict[str, Any], whose: str, seconds: float) -> dict[str, Any]:
        """Has a constraint read and tried; given up if the caller is cancelled.

        Args:
            constraint: `Constraint` as a dict.
            whose: The client: each has the same share of the time.
            seconds: Of processor time.

        Returns:
            As `_process` describes it.

        Raises:
            Unavailable: the process does not start.
        """
        pause = self._earliest - time.monotonic()
        if pause > 0:
            raise self._unavailable(pause)
        number = next(self._numbers)
        line = {"id": number, "whose": whose, "seconds": seconds, "constraint": constraint}
        asked = self._asked[number] = _Asked(line, asyncio.get_running_loop().create_future())
        self._send(asked)
        try:
            is_forked = hasattr(os, "fork")
            done, _ = await asyncio.wait({asked.answer}, timeout=max(_PATIENCE, seconds) if is_forked else seconds)
            if not done and not is_forked:
                self._end()  # it has no limit of its own
                return {"error": "takes too long to read; make it simpler"}
            if not done:
                return {"error": "was not read in time; try again later", "passes": True}
            return asked.answer.result()
        finally:
            del self._asked[number]
            if not asked.answer.done():
                self._post({"drop": number})

    def close(self) -> None:
        """Ends the process, and waits for nothing."""
        self._is_closed = True
        self._end()
        self._sending.shutdown(wait=False)
        if self._file is not None:
            os.close(self._file)

    def _unavailable(self, seconds: float) -> Unavailable:
        return Unavailable(f"grammars cannot be read: is {self._path} still there?", max(seconds, 1.0))

    # ---- In the event loop -------------------------------------------------------------------------------------------

    def _send(self, asked: _Asked) -> None:
        asked.n_sent += 1
        asked.process = None
        self._post(asked.line, asked)

    def _post(self, line: dict[str, Any] | None, asked: _Asked | None = None) -> None:
        if not self._is_closed:
            self._sending.submit(self._write, line, asked, asyncio.get_running_loop())

    def _take(self, answer: dict[str, Any]) -> None:
        asked = self._asked.get(answer.pop("id", -1))
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(answer)

    def _lost(self, process: subprocess.Popen[str] | None, was_ready: bool) -> None:
        """The process has ended, or (None) could not be started. Those who wait for it ask another one, unless that is
        of no use."""
        self._n_failures = 0 if was_ready else self._n_failures + 1
        pause = min(2.0 ** (self._n_failures - 1), _LONGEST_PAUSE) if self._n_failures else 0.0
        self._earliest = time.monotonic() + pause
        for asked in self._asked.values():
            if asked.answer.done() or asked.process is not process:
                continue
            if was_ready and asked.n_sent < _MOST_SENT:
                self._send(asked)
            else:
                asked.answer.set_exception(self._unavailable(pause))

    # ---- In threads --------------------------------------------------------------------------------------------------

    def _write(self, line: dict[str, Any] | None, asked: _Asked | None, loop: asyncio.AbstractEventLoop) -> None:
        try:
            process = self._ready(loop)
        except OSError:
            _call(loop, self._lost, None, False)
            return
        if process is None or line is None:
            return
        if asked is not None:
            asked.process = process
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, as who listens to it tells
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()

    def _ready(self, loop: asyncio.AbstractEventLoop) -> subprocess.Popen[str] | None:
        """The process; None behind the end."""
        with self._lock:
            if self._process is None and not self._is_closed:
                path, files = self._path, list[int]()
                if self._file is not None and not os.path.exists(path):  # it was moved, and is still open here
                    path, files = f"/dev/fd/{self._file}", [self._file]
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pyfly_cpp.grammar._process", path, str(self._max_bytes)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                    pass_fds=files,
                )  # fmt: skip
                listening = threading.Thread(target=self._listen, args=(self._process, loop), daemon=True)
                listening.start()
            return self._process

    def _listen(self, process: subprocess.Popen[str], loop: asyncio.AbstractEventLoop) -> None:
        assert process.stdout is not None
        was_ready = False
        with contextlib.suppress(ValueError, OSError):  # cut in a line
            for line in process.stdout:
                was_ready = True
                _call(loop, self._take, json.loads(line))
        self._end(process)
        _call(loop, self._lost, process, was_ready)

    def _end(self, process: subprocess.Popen[str] | None = None) -> None:
        """Ends the process, or this one, and frees what it has."""
        with self._lock:
            ended = process or self._process
            if ended is self._process:
                self._process = None
            if ended is None:
                return
            ended.kill()
            ended.wait()
            for pipe in (ended.stdin, ended.stdout if process is not None else None):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _held(path: str) -> int | None:
    """A file that stays open, so that it can be read again after it was moved; None if that is not possible."""
    if os.name != "posix":
        return None
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY)
    return None


def _call(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)
