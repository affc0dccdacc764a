"""What a measurement depends on: machine, versions, model files."""

from __future__ import annotations

import os
import platform
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import llama_cpp

from pyfly_cpp import _native, extra_buffers
from pyfly_cpp.files import sha256
from pyfly_cpp.threads import physical_cores


def describe_machine() -> dict[str, Any]:
    """Processor, cores, system, load and versions."""
    from pyfly_cpp import __version__

    cpu = platform.processor() or platform.machine()
    if sys.platform.startswith("linux"):
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        cpu = found[1].strip() if found else cpu
    return {
        "cpu": cpu,
        "physical_cores": physical_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pyfly_cpp": __version__,
        "simd": _native.simd_level,
        "llama_cpp_python": llama_cpp.__version__,
        "extra_buffers": extra_buffers.usable(),
        "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
        "python": platform.python_version(),
    }


def describe_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Name, size and hash of a model file: what makes two runs runs of the same model."""
    path = Path(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def resident_mib() -> float | None:
    """Memory of this process that is in RAM now, MiB, mapped model files included; None where it cannot be told."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else None
