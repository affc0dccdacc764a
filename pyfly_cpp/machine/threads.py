"""Numbers of threads for decoding: the default, and the limits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyfly_cpp.machine import groups
from pyfly_cpp.machine.releases import MOST_THREADS
from pyfly_cpp.ranges import is_integer

THREAD_COUNTS = ("n_threads", "n_threads_batch")
"""Arguments of llama_cpp.Llama: threads for one token, and for batches."""

AUTO = "auto"
"""A word in place of a thread count: as many threads as help under the load of the machine, the physical cores at
most."""

DEEP_STACK = 2**24
"""Bytes of the stack of a thread that follows grammars which were tried with a quarter of it: llguidance recurses."""

_NEARLY_A_CORE = 0.4
"""Share of a CPU that a quota may lack for another thread. With less, all threads stop until the next period:
two threads were 0.95 times as fast as one with a quota of 1.5 CPUs, and 1.14 times with 1.8."""


def require_threads(n: Any, name: str = "n_threads") -> int:
    """Returns `n` if it is a number of threads, 1..MOST_THREADS; raises ValueError otherwise."""
    if not is_integer(n) or not 1 <= n <= MOST_THREADS:
        raise ValueError(f"{name} must be an integer in 1..{MOST_THREADS}, not {n!r}.")
    return int(n)


def is_automatic(n: Any) -> bool:
    """Whether this leaves the number of threads to us: "auto", None, 0, or, as in llama.cpp's tools, a negative one."""
    return n is None or n == AUTO or (is_integer(n) and n <= 0)


def adaptive_threads(n_threads: object, n_threads_batch: object) -> tuple[bool, bool]:
    """Whether the thread counts for one token and for batches follow the load of the machine: if neither was given
    (`is_automatic`), both; a number holds for what it was given for, and one for single tokens for both.

    Raises ValueError for anything else that is no number of threads.
    """
    for name, n in zip(THREAD_COUNTS, (n_threads, n_threads_batch)):
        if isinstance(n, str) and n != AUTO:
            raise ValueError(f"{name} must be a number of threads or {AUTO!r}, not {n!r}.")
        if not is_automatic(n):
            require_threads(n, name)
    return is_automatic(n_threads), is_automatic(n_threads) and is_automatic(n_threads_batch)


def fill_thread_counts(arguments: dict[str, Any]) -> tuple[bool, bool]:
    """Fills in the physical cores if these arguments of llama_cpp.Llama leave a count to us. Returns, and raises, what
    `adaptive_threads` does."""
    adapts = adaptive_threads(*(arguments.get(name) for name in THREAD_COUNTS))
    cores = physical_cores()
    for name in THREAD_COUNTS:
        arguments[name] = cores if is_automatic(arguments.get(name)) else arguments[name]
    return adapts


def physical_cores() -> int:
    """Physical cores this process may run on, as far as a container's quota of CPU time pays for them; >= 1.

    Decoding is bound by memory and by barriers between threads; hyper-threads make it slower. llama-cpp-python defaults
    to half of the *logical* CPUs, which is right only if every core has two of them.
    """
    if sys.platform.startswith("linux"):
        quota = groups.cpu_quota()
        return _linux_cores() if quota is None else max(1, min(_linux_cores(), int(quota + _NEARLY_A_CORE)))
    if sys.platform == "darwin":
        for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):  # performance cores first
            try:
                return max(1, int(subprocess.check_output(["sysctl", "-n", name], stderr=subprocess.DEVNULL)))
            except (OSError, ValueError, subprocess.CalledProcessError):
                continue
    return max(1, (os.cpu_count() or 2) // 2)


def _linux_cores() -> int:
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(
                encoding="ascii"
            )
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return max(1, len(cores))


def threads_sleep() -> bool:
    """Whether OMP_WAIT_POLICY makes threads sleep while they wait for each other, hundreds of times for each token
    (docs/how-it-decides.md)."""
    return os.environ.get("OMP_WAIT_POLICY", "").strip().upper() == "PASSIVE"


@contextlib.contextmanager
def stacks_of(n_bytes: int) -> Iterator[None]:
    """Threads that are started meanwhile have stacks of this size, where the system lets a program choose."""
    before = None
    with contextlib.suppress(ValueError, RuntimeError):
        before = threading.stack_size(n_bytes)
    try:
        yield
    finally:
        if before is not None:
            threading.stack_size(before)
