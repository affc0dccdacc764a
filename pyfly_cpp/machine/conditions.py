"""Conditions of a measurement: machine, versions, model files."""

from __future__ import annotations

import os
import platform
import re
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp._version import __version__
from pyfly_cpp.machine import extra_buffers, kernels
from pyfly_cpp.machine.files import files_of_model, sha256
from pyfly_cpp.machine.memory import bytes_of_model
from pyfly_cpp.machine.threads import physical_cores, threads_sleep

_DISTURBING = 0.25
"""Cores that other programs may use before no speed is to be believed. An idle desktop stays under 0.1."""


CONDITIONS = ("cpu", "physical_cores", "pyfly_cpp", "llama_cpp_python", "extra_buffers", "kernels")
"""Of `describe_machine()`: must be equal for measurements to stand in one table."""


class Watch:
    """How much of this process's CPUs others use, from when it is made. Child processes are ours once they have
    ended."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._before = _seconds_of_others()

    def used(self) -> float | None:
        """Cores, on average until now; None on systems that do not show it (all but Linux)."""
        now, seconds = _seconds_of_others(), time.monotonic() - self._started
        if now is None or self._before is None or seconds <= 0:
            return None
        return max(0.0, round((now - self._before) / seconds, 2))


def _seconds_of_others() -> float | None:
    """CPU time that others have had on this process's CPUs since the system was started."""
    try:
        ours = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        # user, nice, system, idle, iowait, irq, softirq, steal
        ticks = [[int(n) for n in row[1:9]] for row in rows if row[0] in ours]
        used = sum(sum(row) - row[3] - row[4] for row in ticks) / os.sysconf("SC_CLK_TCK")
        children = os.times()
        return used - time.process_time() - children.children_user - children.children_system
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def used_by_others(seconds: float = 0.5) -> float | None:
    """How many of this process's CPUs other processes use, on average over so many seconds; None on systems that do not
    show it (all but Linux). Takes that long."""
    watch = Watch()
    time.sleep(seconds)
    return watch.used()


def is_disturbing(used: float | None) -> bool:
    """Whether no speed is to be believed beside others that use so many cores."""
    return used is not None and used > _DISTURBING


def disturbance(machine: dict[str, Any]) -> str | None:
    """Why speeds measured on this machine (`describe_machine()`) are not to be believed, in a sentence; else None."""
    if machine.get("threads_sleep"):
        return "OMP_WAIT_POLICY is PASSIVE, so threads sleep while they wait for each other; unset it."
    used = machine["used_by_others"]
    if used is None:  # the load includes what has just ended
        load, cores = machine["load_before"], machine["physical_cores"]
        if load is None or load <= 0.5 * cores:
            return None
        return f"the load of this machine was {load} on {cores} cores before the run; close other programs."
    if not is_disturbing(used):
        return None
    return f"other programs were using {used:.1f} of {machine['physical_cores']} cores before the run; close them."


def describe_machine() -> dict[str, Any]:
    """Processor, cores, system, what other programs do, and versions. Looks at the machine for half a second."""
    return {
        "cpu": extra_buffers.cpu_model() or platform.processor() or platform.machine(),
        "physical_cores": physical_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "used_by_others": used_by_others(),
        "threads_sleep": threads_sleep(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pyfly_cpp": __version__,
        "simd": _native.simd_level,
        "llama_cpp_python": llama_cpp.__version__,
        "extra_buffers": extra_buffers.usable(),
        "kernels": kernels.require_choice(None),
        "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
        "python": platform.python_version(),
    }


def describe_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Name, size and hash of a model file, with all parts of a split one: what makes two runs runs of the same
    model."""
    return {"file": Path(path).name, "bytes": bytes_of_model(path), "sha256": sha256(*files_of_model(path))}


def resident_mib() -> float | None:
    """Memory of this process that is in RAM now, MiB, mapped model files included; None if it cannot be told."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else None
