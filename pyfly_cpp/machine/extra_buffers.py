"""Whether llama.cpp's extra buffer types can be used: the weights it repacks for the CPU's own instructions.

The one for Intel's AMX cannot where llama.cpp was compiled by a GCC with bug 114098, such as Debian 12's 12.2: it drops
stores to the tile configuration, and the first quantised product of a batch ends the process. So, on a CPU with AMX
and with a llama.cpp that uses it, a child process tries such products (`_extra_buffers_probe.py`), once for each
library file and CPU: the answer is kept in the cache folder. Where they fail, AMX is left out of what llama.cpp offers
to the models of this process; where its list cannot be changed (`kernels.py` says why), models are loaded with
`llama_model_params.use_extra_bufts = False`, which leaves out all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine.cache import cache_folder
from pyfly_cpp.machine.files import OutputError, write_atomically

VARIABLE = "PYFLY_EXTRA_BUFFERS"
"""Environment variable that decides instead: 1 to use the extra buffer types, 0 not to."""

_PROBE = Path(__file__).with_name("_extra_buffers_probe.py")
_TIMEOUT = 20.0
"""Seconds for the probe, which takes a tenth of one."""
_KEPT = ("right", "wrong", "crashed")
"""Outcomes that hold as long as library and CPU are the same."""


class Verdict(NamedTuple):
    """Whether the extra buffer types can be used, and why."""

    usable: bool
    reason: str
    """A sentence without its full stop."""
    remedy: str | None = None
    """What brings them back; None where they can be used or are not wanted."""


@functools.lru_cache(maxsize=1)
def usable() -> bool:
    """Whether models may be loaded with `use_extra_bufts`. Warns, once in a process, where they should but cannot.

    Where the CPU or llama.cpp has no AMX it costs microseconds; otherwise the first call reads a library, and the first
    ever starts a process.

    Raises:
        ValueError: PYFLY_EXTRA_BUFFERS is neither 0 nor 1.
    """
    found = verdict()
    if found.remedy is not None:
        warnings.warn(
            f"{found.reason}, so models are loaded without repacked weights, which makes batches slower; "
            f"{found.remedy}.",
            RuntimeWarning,
            stacklevel=2,
        )
    return found.usable


@functools.lru_cache(maxsize=1)
def verdict() -> Verdict:
    """What `usable` decides, and why. Raises ValueError as it does."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {wish!r}; set it to 0 or 1, or not at all.")
    if wish:
        return Verdict(wish == "1", f"{VARIABLE} is {wish}")
    if not _library_has_amx():
        return Verdict(True, "llama.cpp was compiled without AMX")
    cpu = _cpu()
    if "amx_int8" not in cpu.get("flags", "").split():
        return Verdict(True, "this CPU has no AMX")
    outcome = _outcome(cpu.get("model name", ""))
    if outcome == "right":
        return Verdict(True, "llama.cpp's AMX kernels were tried, and work")
    if outcome == "absent":
        return Verdict(True, "this system does not let llama.cpp use AMX")
    if outcome in _KEPT:
        fault = "crash" if outcome == "crashed" else "compute wrong products"
        reason = f"llama.cpp's AMX kernels {fault} on this CPU (GCC bug 114098)"
        remedy = (
            'reinstall llama-cpp-python with `CMAKE_ARGS="-DCMAKE_CXX_FLAGS=-fno-dse" pip install --force-reinstall '
            f"--no-deps --no-cache-dir --no-binary llama-cpp-python llama-cpp-python=={llama_cpp.__version__}`"
        )
    else:
        reason = f"llama.cpp's AMX kernels, which crash in some builds, could not be tried ({outcome})"
        remedy = f"set {VARIABLE}=1 if they are known to work"
    with contextlib.suppress(NativeError):
        _native.leave_out("AMX")
        return Verdict(True, f"{reason}, and are left out")
    return Verdict(False, reason, remedy)


def guard_llama_cpp() -> None:
    """Makes plain `llama_cpp.Llama` objects of this process follow the verdict too: for comparisons with them."""
    default_params = llama_cpp.llama_cpp.llama_model_default_params
    if usable() or not default_params().use_extra_bufts:
        return

    @functools.wraps(default_params)
    def without_extra_buffers() -> Any:
        params = default_params()
        params.use_extra_bufts = False
        return params

    for module in (llama_cpp, llama_cpp.llama_cpp):
        module.llama_model_default_params = without_extra_buffers


# ---- The machine and the library -------------------------------------------------------------------------------------


def _library_has_amx() -> bool:
    return b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()


def _cpu() -> dict[str, str]:
    """What Linux says about the first CPU; elsewhere nothing: llama.cpp uses AMX under Windows too, but is not compiled
    by GCC there."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).partition("\n\n")[0]
    except OSError:
        return {}
    return dict(re.findall(r"^([^\t:]+)\t*: (.*)$", first, re.MULTILINE))


def cpu_model() -> str:
    """The name of the processor, or an empty text where the system does not tell."""
    return _cpu().get("model name", "")


def _library() -> Path:
    """The file that holds ggml's CPU backend, as llama_cpp loaded it. Raises OSError, ImportError, AttributeError."""
    from llama_cpp import _ggml  # not a public module

    class DlInfo(ctypes.Structure):
        _fields_ = (
            ("path", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    info = DlInfo()
    inside = ctypes.cast(_ggml.libggml.ggml_backend_cpu_reg, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(inside, ctypes.byref(info)):
        raise OSError("the system does not tell which file holds ggml's CPU backend")
    return Path(os.fsdecode(info.path))


# ---- The probe and its outcome ---------------------------------------------------------------------------------------


def _outcome(cpu: str) -> str:
    """right, wrong, absent or crashed; or else why that is not known."""
    try:
        library = _library()
        key = hashlib.sha256(library.read_bytes() + cpu.encode("utf-8")).hexdigest()
    except (OSError, ImportError, AttributeError) as error:
        return str(error)
    known = _read_outcomes().get(key)
    if known in _KEPT:
        return known
    outcome = _probe(library)
    if outcome in _KEPT:
        _keep_outcome(key, outcome)
    return outcome


def _command(library: Path) -> list[str]:
    return [sys.executable or "", "-I", "-S", str(_PROBE), str(library), "AMX"]


def _probe(library: Path) -> str:
    # One thread is enough, and a machine's two hundred would take longer to start than to work. An interpreter that is
    # none, but a program with Python in it, must not probe in its turn.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: "0"}
    try:
        done = subprocess.run(
            _command(library),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_TIMEOUT,
        )
    except OSError as error:
        return f"the probe does not start: {error.strerror or error}"
    except subprocess.TimeoutExpired:
        return f"the probe did not end within {_TIMEOUT:g} seconds"
    if -done.returncode in (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT):
        return "crashed"
    said = done.stdout.decode("ascii", errors="replace").strip()
    return said if said in ("right", "wrong", "absent") else f"the probe ended with status {done.returncode}"


def _outcomes_file() -> Path:
    return cache_folder() / "extra_buffers.json"


def _read_outcomes() -> dict[str, str]:
    """Outcome by hash; empty where there is no readable file."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, RecursionError):
        saved = json.loads(_outcomes_file().read_text(encoding="utf-8"))
        if isinstance(saved, dict):
            return {key: outcome for key, outcome in saved.items() if outcome in _KEPT}
    return {}


def _keep_outcome(key: str, outcome: str) -> None:
    """Where it cannot be kept, the next process probes again."""
    with contextlib.suppress(OSError, RuntimeError, OutputError):
        path = _outcomes_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**_read_outcomes(), key: outcome}, indent=2))
