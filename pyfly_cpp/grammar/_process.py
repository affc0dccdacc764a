"""The process that reads grammars: `python -m pyfly_cpp.grammar._process MODEL MAX_BYTES`.

It loads the vocabulary once and forks a reader for each constraint, which a hard grammar may end without harm. Two
readers run at a time. Each has a slice of time, and the next one is of the client who had the least, and of its
grammars the one that had the least: a simple grammar is read immediately, whoever sends how many others.

Lines of JSON:
    in: {"id": N, "whose": CLIENT, "seconds": S, "constraint": {...}}; {"drop": N}: nobody waits for that one any more.
    out: {"ready": true} at the beginning; {"id": N, ...} with the fields of `Probe.answer`. An error that another time
        may not be has also "passes": true.

S is processor time. Where a process cannot be forked, grammars are read here, one after the other and without a limit:
whoever waits too long ends this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from pyfly_cpp.grammar._probe import MEMORY, TOO_LARGE, TOO_SLOW, Probe, limit_memory

_N_AT_ONCE = 2
_SLICE = 0.05
"""Seconds until others run."""
_MEMORY_OF_ALL = 4 * MEMORY
_NICE = 5
"""Below those who write the answers."""
_DIE_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""


def main(model_path: str, max_bytes: int) -> None:
    """Serves lines until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    try:
        probe = Probe(model_path, max_bytes)
    except OSError:
        sys.exit(1)  # the file is not there any more, as the missing line tells
    _write(1, {"ready": True})
    if hasattr(os, "fork"):
        os.nice(_NICE)
        Readers(probe).run()
        return
    limit_memory()
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            _write(1, {"id": asked["id"], **probe.answer(asked["constraint"])})


class GrammarReader:
    """A forked process that reads one constraint."""

    def __init__(self, number: int, whose: str, pid: int = 0, pipe: int = -1) -> None:
        self.number = number
        """The id of its line."""
        self.whose = whose
        self.pid = pid
        self.pipe = pipe
        """Its answer comes here."""
        self.answer = b""
        self.seconds = 0.0
        """How long it has run."""
        self.is_running = True
        self.is_victim = False
        """Whether it was ended for the memory of all."""


class ReaderTurns:
    """Whose readers run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """The time that each client's readers have had while it had any."""

    def spend(self, readers: list[GrammarReader], seconds: float) -> None:
        """Counts a slice of those that run, and forgets clients that have no readers."""
        present = {reader.whose for reader in readers}
        self.seconds = {whose: self.seconds.get(whose, 0.0) for whose in present}
        for reader in readers:
            if reader.is_running:
                reader.seconds += seconds
                self.seconds[reader.whose] += seconds

    def next(self, readers: list[GrammarReader]) -> list[GrammarReader]:
        """Those that are to run in the next slice."""

        def had(reader: GrammarReader) -> tuple[float, float, int]:
            return self.seconds.get(reader.whose, 0.0), reader.seconds, reader.number

        return sorted(readers, key=had)[:_N_AT_ONCE]


class Readers:
    """The readers of a process, and its loop."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._selector = selectors.DefaultSelector()
        self._readers: dict[int, GrammarReader] = {}
        self._turns = ReaderTurns()

    def run(self) -> None:
        """Serves lines until stdin ends; ends its readers then."""
        lines = _Lines()
        self._selector.register(0, selectors.EVENT_READ)
        last = time.monotonic()
        while True:
            are_many = len(self._readers) > _N_AT_ONCE
            ready = [key.data for key, _ in self._selector.select(_SLICE if are_many else None)]
            now = time.monotonic()
            self._turns.spend(list(self._readers.values()), now - last)
            last = now
            for reader in ready:
                if reader is not None:
                    self._hear(reader)
            if None in ready:
                for asked in lines.read():
                    if "drop" not in asked:
                        self._begin(asked)
                    elif asked["drop"] in self._readers:
                        self._end(self._readers[asked["drop"]])
                if lines.is_over:
                    break
            self._take_turns()
            self._bound_memory()
        for reader in list(self._readers.values()):
            self._end(reader)

    def _begin(self, asked: dict[str, Any]) -> None:
        pipe, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(end, 1)
                self._read(asked)
            finally:
                os._exit(1)
        os.close(end)
        reader = GrammarReader(asked["id"], asked["whose"], pid, pipe)
        self._readers[reader.number] = reader
        self._selector.register(pipe, selectors.EVENT_READ, reader)

    def _read(self, asked: dict[str, Any]) -> None:
        """The life of a reader."""
        with contextlib.suppress(AttributeError, OSError):  # it may be stopped when this process is killed
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        limit_memory()
        signal.setitimer(signal.ITIMER_PROF, max(asked["seconds"], 1e-3))
        answer = self._probe.answer(asked["constraint"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(1, answer)
        os._exit(0)

    def _hear(self, reader: GrammarReader) -> None:
        part = os.read(reader.pipe, 2**16)
        reader.answer += part
        if not part and reader.number in self._readers:
            answer = _verdict(reader, self._end(reader))
            _write(1, {"id": reader.number, **answer})

    def _end(self, reader: GrammarReader) -> int:
        """How it ended, as `os.waitpid` tells it."""
        del self._readers[reader.number]
        self._selector.unregister(reader.pipe)
        os.close(reader.pipe)
        os.kill(reader.pid, signal.SIGKILL)  # changes nothing if it has ended
        return os.waitpid(reader.pid, 0)[1]

    def _take_turns(self) -> None:
        readers = list(self._readers.values())
        chosen = self._turns.next(readers)
        for reader in readers:
            is_next = reader in chosen
            if is_next != reader.is_running:
                reader.is_running = is_next
                os.kill(reader.pid, signal.SIGCONT if is_next else signal.SIGSTOP)

    def _bound_memory(self) -> None:
        if len(self._readers) * MEMORY <= _MEMORY_OF_ALL:
            return
        own = _memory_of(os.getpid())
        grown = {reader.number: _memory_of(reader.pid) - own for reader in self._readers.values()}
        if sum(grown.values()) > _MEMORY_OF_ALL:
            largest = self._readers[max(grown, key=lambda number: grown[number])]
            largest.is_victim = True
            os.kill(largest.pid, signal.SIGKILL)


def _verdict(reader: GrammarReader, status: int) -> dict[str, Any]:
    """The answer for a constraint whose reader has ended."""
    if reader.is_victim:
        return {"error": "takes much memory while others are read; try again later", "passes": True}
    if status == 0:
        answer: dict[str, Any] = json.loads(reader.answer)
        return answer
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGPROF, signal.SIGVTALRM):
        return {"error": TOO_SLOW}
    return {"error": TOO_LARGE, "passes": number == signal.SIGKILL}  # the system may have chosen it for its own need


def _memory_of(pid: int) -> int:
    """Bytes of a process that are in memory and of no file; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        _, n, n_shared = map(int, file.read().split()[:3])
        return (n - n_shared) * os.sysconf("SC_PAGE_SIZE")
    return 0


class _Lines:
    """The lines of stdin, as they come."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_over = False

    def read(self) -> Iterator[dict[str, Any]]:
        """Those that are whole after one more reading, which must not have to wait."""
        part = os.read(0, 2**16)
        self.is_over = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        yield from map(json.loads, lines)


def _write(file: int, answer: dict[str, Any]) -> None:
    content = json.dumps(answer).encode() + b"\n"
    while content:
        content = content[os.write(file, content) :]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
