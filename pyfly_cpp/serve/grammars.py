"""Grammars and schemas of strangers: read and tried in a process of their own, which may take so long and no longer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pyfly_cpp.serve.errors import ApiError, bad_request

_N_KEPT = 64
_MOST_PENDING = 16


class Constraint(NamedTuple):
    """The grammar that a text must follow."""

    kind: str
    """`"gbnf"`, `"schema"` (a list of `Framed` as JSON: it follows one of them), or `"good"`: a grammar that was
    tried."""
    text: str
    param: str = ""
    """The field of the request that it comes from."""
    is_repeated: bool = False
    """Whether it may follow a schema several times."""
    loose: tuple[str, ...] = ()
    """The keywords of its schemas that a good grammar does not enforce."""

    def or_else(self, other: Constraint) -> Constraint:
        """What follows either, both of schemas."""
        both = [*json.loads(self.text), *json.loads(other.text)]
        return self._replace(text=json.dumps(both), is_repeated=False)


class Unavailable(RuntimeError):
    """The process that reads grammars does not start."""


class _Verdict(NamedTuple):
    grammar: str | None
    error: str = ""
    loose: tuple[str, ...] = ()


class Grammars:
    """Turns constraints into grammars that are known to be harmless."""

    def __init__(self, model_path: str, max_bytes: int, seconds: float) -> None:
        """
        Args:
            model_path: Whose vocabulary they are tried with.
            max_bytes: Of a grammar.
            seconds: For one.
        """
        self._command = [sys.executable, "-m", "pyfly_cpp.serve._grammar_probe", model_path, str(max_bytes)]
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pyfly-grammars")
        self._n_pending = 0
        self._known: OrderedDict[Constraint, _Verdict] = OrderedDict()

    def start(self) -> None:
        """Makes the process ready, in the background."""
        self._thread.submit(self._ready)

    async def compile(self, constraint: Constraint) -> Constraint:
        """The grammar of a constraint. Raises ApiError: it is too large, too slow, or cannot be read; Unavailable."""
        if constraint.kind == "good":
            return constraint
        if len(constraint.text.encode("utf-8")) > self._max_bytes:
            raise bad_request(
                f"{constraint.param} has more than {self._max_bytes} bytes; make it smaller.", constraint.param
            )
        if "\0" in constraint.text:
            raise bad_request(f"{constraint.param} has a NUL character; leave it out.", constraint.param)
        known = self._known.get(constraint)
        if known is None:
            if self._n_pending >= _MOST_PENDING:
                raise ApiError(429, "too many grammars are waiting to be read; try again later.", code="queue_full",
                               headers={"Retry-After": "5"})  # fmt: skip
            self._n_pending += 1
            try:
                known = await asyncio.get_running_loop().run_in_executor(self._thread, self._try, constraint)
            finally:
                self._n_pending -= 1
            if known is None:  # another time it may be better
                what = f"takes more than {self._seconds:g} seconds, or too much memory, to read; make it simpler"
                raise bad_request(f"{constraint.param} {what}.", constraint.param)
            self._known[constraint] = known
            while len(self._known) > _N_KEPT:
                self._known.popitem(last=False)
        if known.grammar is None:
            raise bad_request(f"{constraint.param} {known.error}.", constraint.param)
        return Constraint("good", known.grammar, constraint.param, loose=known.loose)

    def close(self) -> None:
        """Ends the process."""
        self._end()
        self._thread.shutdown(wait=False)

    # ---- In the thread -----------------------------------------------------------------------------------------------

    def _try(self, constraint: Constraint) -> _Verdict | None:
        """None: the process was too slow, or ended."""
        process = self._ready()
        timer = threading.Timer(self._seconds, process.kill)
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(constraint._asdict()) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            self._end()
            return None
        finally:
            timer.cancel()
        return _Verdict(answer.get("grammar"), answer.get("error", ""), tuple(answer.get("loose", ())))

    def _ready(self) -> subprocess.Popen[str]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                assert self._process.stdout is not None
                if not self._process.stdout.readline():  # it says that it is ready
                    self._process.wait()
                    self._process = None
                    raise Unavailable(f"grammars cannot be read: is {self._command[-2]} still there?")
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
