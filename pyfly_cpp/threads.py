"""How many threads to decode with by default."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

AUTO = "auto"
"""In place of a thread count: as many as the load of the machine lets pay, the physical cores at most."""


def adaptive_threads(n_threads: object, n_threads_batch: object) -> tuple[bool, bool]:
    """Whether the thread counts for one token and for batches follow the load of the machine: where neither was given
    (None, 0 or "auto"), both; a number holds for what it was given for, and one for single tokens for both.

    Raises ValueError for another text.
    """
    for name, value in (("n_threads", n_threads), ("n_threads_batch", n_threads_batch)):
        if isinstance(value, str) and value != AUTO:
            raise ValueError(f"{name} must be a number of threads or {AUTO!r}, not {value!r}.")
    free = (None, 0, AUTO)
    return n_threads in free, n_threads in free and n_threads_batch in free


def physical_cores() -> int:
    """Physical cores this process may run on, >= 1.

    Decoding is bound by memory and by barriers between threads; hyper-threads make it slower. llama-cpp-python defaults
    to half of the *logical* CPUs, which is right only where every core has two of them.
    """
    if sys.platform.startswith("linux"):
        return _linux_cores()
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
