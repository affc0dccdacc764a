"""What is known of our kernels on this machine: found once by a process of its own (`kernel_trial.py`), and kept for
each build of llama.cpp in the file `kernels.json` of the cache folder.

Kernels whose results are right are used. Those that seem slower than llama.cpp's are looked at again at the first start
ten minutes later or more, and left out from then on if they still seem so: one busy moment is not for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp._version import __version__
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine.cache import keeping, kept_path
from pyfly_cpp.machine.extra_buffers import cpu_model
from pyfly_cpp.machine.files import only_writer, write_atomically

ATTENTION = -1
"""The operation that is attention. All others are products, numbered by the `ggml_type` of their weights."""

_WAY = 6
"""Version of the trial; findings of another version are not read."""
_PROGRAM = ("-m", "pyfly_cpp.machine.kernel_trial")
"""The trial, as arguments of Python."""
_SECONDS = 120
"""Most seconds that a trial may take; on an idle machine it takes a few."""
_LOOKS = 2
"""Trials of an operation that seems slower, before it is left out."""
_APART = 600
"""Least seconds between two of these trials."""
_STARTS = 2
"""Processes that may end while they enable our kernels, because one may have been stopped for another reason."""
_STOPPED = {getattr(signal, name, None) for name in ("SIGHUP", "SIGINT", "SIGKILL", "SIGTERM")}
"""Signals that end a trial from outside, and prove nothing about the kernels."""


class Findings(NamedTuple):
    """The findings for one build of llama.cpp on one processor."""

    right: tuple[int, ...] = ()
    """Operations whose results are right: types in ascending order, and ATTENTION."""
    slower: tuple[int, ...] = ()
    """Those of them that seemed slower than llama.cpp's in every trial so far."""
    looks: int = 0
    """Trials of the time so far."""
    looked: float = 0.0
    """Time of the last one, seconds since 1970."""
    why_not: str = ""
    """The reason why no operation is right, without a full stop; empty if some are."""
    begun: int = 0
    """Processes that began to enable them and are not known to have finished."""

    @property
    def used(self) -> frozenset[int]:
        """The operations that our kernels compute."""
        return frozenset(self.right) - (frozenset(self.slower) if self.looks >= _LOOKS else frozenset())

    @property
    def doubtful(self) -> tuple[int, ...]:
        """The operations whose speed has to be tried again now."""
        is_early = 0 <= time.time() - self.looked < _APART
        return () if self.looks >= _LOOKS or is_early else self.slower


class _NotTried(Exception):
    """Nothing was found out, for a reason that may be gone the next time."""


def find() -> Findings:
    """The findings of this machine. Without any, tries the kernels now, which takes some seconds. Requires installed
    kernels, and enables them if some are used. Warns of a trial that ended badly."""
    key = _key()
    known, is_new = _read().get(key, _NOTHING), False
    try:
        if _is_open(known):
            with _turn():
                known = _read().get(key, _NOTHING)
                if _is_open(known):  # or another process has tried them meanwhile
                    known, is_new = (_again if known.looks else _first)(key, known), True
        if known.used:
            _native.enable_kernels()
    except (NativeError, _NotTried) as error:
        return Findings(why_not=str(error).rstrip("."))
    if known.why_not:
        with contextlib.suppress(RuntimeError):  # no home folder, and so no file
            known = known._replace(why_not=f"{known.why_not}; delete {_path()} to try them again")
        if is_new:
            warnings.warn(f"llama.cpp's kernels are used, not ours: {known.why_not}.", RuntimeWarning, stacklevel=2)
    return known


_NOTHING = Findings()


def is_untried() -> bool:
    """Whether `find` would try the kernels now."""
    return _is_open(_read().get(_key(), _NOTHING))


def _is_open(known: Findings) -> bool:
    return bool(known == _NOTHING or known.begun or known.doubtful)


def _first(key: str, unfinished: Findings) -> Findings:
    if unfinished.begun >= _STARTS:
        return Findings(why_not="the process ended each time that ours were enabled")
    found = _tried(())
    if found.used:
        _keep(key, Findings(begun=unfinished.begun + 1))  # stays there if this process ends
        try:
            _native.enable_kernels()
        except NativeError as error:
            found = Findings(why_not=str(error).rstrip("."))
    _keep(key, found)
    return found


def _again(key: str, known: Findings) -> Findings:
    try:
        found = _tried(known.doubtful)
    except _NotTried:
        return known
    if not found.why_not:
        found = known._replace(slower=found.slower, looks=known.looks + 1, looked=found.looked)
    _keep(key, found)
    return found


# ---- Trying ----------------------------------------------------------------------------------------------------------


def _tried(operations: Sequence[int]) -> Findings:
    """What a process of its own finds of these operations, or of all. Raises _NotTried."""
    command = [sys.executable, *_PROGRAM, *map(str, operations)]
    code: int | None
    try:
        where = os.pathsep.join(filter(None, sys.path))  # a program may have put the package there itself
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": where}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
        code, printed, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, printed, errors = None, late.stdout or b"", b""
    except (OSError, ValueError) as error:  # no such program, no more processes
        raise _NotTried(f"no process can be started to try ours ({error})") from None
    said: dict[str, Any] = {}
    for line in printed.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            said.update(json.loads(line))
    if "why_not" in said:
        return Findings(why_not=said["why_not"])
    if code is not None and code < 0 and -code not in _STOPPED:
        return Findings(why_not=f"a trial of ours crashed ({_name_of(-code)})")
    if "right" in said:  # without all times if it was stopped, and nobody knows that they are slower
        return Findings(tuple(said["right"]), tuple(said.get("slower", ())), looks=1, looked=time.time())
    if code is None:
        return Findings(why_not=f"a trial of ours did not end within {_SECONDS} s")
    lines = errors.decode("utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
    raise _NotTried(f"ours could not be tried ({last.rstrip('.')})")


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- What is kept ----------------------------------------------------------------------------------------------------


def _key() -> str:
    parts = (
        _WAY, __version__, llama_cpp.__version__, _native.ggml_build(), _native.kernels_isa(), _native.kernel_types(),
        cpu_model(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode() + llama_cpp.llama_print_system_info()).hexdigest()


def _path() -> Path:
    return kept_path("kernels")


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """One process at a time tries the kernels. Where no file can be written, each tries them for itself."""
    begin = time.monotonic()

    def wait() -> None:
        if time.monotonic() - begin > 2 * _SECONDS:
            raise _NotTried("another process has been trying ours for long")

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):
            folder = _path().parent
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(folder / "kernels.lock", wait))
        yield


def _read() -> dict[str, Findings]:
    """What is known, by machine; empty if there is no readable file."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, RecursionError, AttributeError):
        saved: Any = json.loads(_path().read_text(encoding="utf-8"))
        return {key: found for key, found in ((key, _found_in(entry)) for key, entry in saved.items()) if found}
    return {}


def _found_in(entry: Any) -> Findings | None:
    """None: it is of another version, or damaged."""
    with contextlib.suppress(ValueError, TypeError, LookupError, OverflowError):
        right, slower = (tuple(int(one) for one in entry[name]) for name in ("right", "slower"))
        if {*_native.kernel_types(), ATTENTION}.issuperset((*right, *slower)):
            numbers = int(entry["looks"]), float(entry["looked"])
            return Findings(right, slower, *numbers, str(entry["why_not"]), int(entry["begun"]))
    return None


def _keep(key: str, found: Findings) -> None:
    """If it cannot be kept, the next process tries again."""
    with keeping():
        entries = {**_read(), key: found}
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(), json.dumps({name: entry._asdict() for name, entry in entries.items()}, indent=2))
