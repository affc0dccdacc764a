"""What a record is of: the processor by its own name, the sources of what is timed, the compilers."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import llama_cpp

import pyfly_cpp
from pyfly_cpp import _native
from pyfly_cpp.machine.conditions import describe_machine
from pyfly_cpp.machine.extra_buffers import cpu_fields
from pyfly_cpp.models.named import embedded_model

ROOT = Path(__file__).parents[1]

TIMED = ("csrc/kernels", "csrc/policy")
"""Folders with the kernels and the governor: a figure is as old as the last change of what they do."""
_STRING_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])')|//[^\n]*|/\*.*?\*/""", re.DOTALL)

_AMD = {
    (0x17, range(0x00, 0x30)): "Zen 1", (0x17, range(0x30, 0x100)): "Zen 2", (0x19, range(0x00, 0x10)): "Zen 3",
    (0x19, range(0x10, 0x20)): "Zen 4", (0x19, range(0x20, 0x60)): "Zen 3", (0x19, range(0x60, 0xB0)): "Zen 4",
    (0x1A, range(0x00, 0x100)): "Zen 5",
}  # fmt: skip
"""Family, and models: as in the `amd` part of GCC's `gcc/common/config/i386/cpuinfo.h`."""
_INTEL = {
    0x55: "Skylake-SP", 0x6A: "Ice Lake-SP", 0x6C: "Ice Lake-SP", 0x8F: "Sapphire Rapids", 0xCF: "Emerald Rapids",
    0xAD: "Granite Rapids", 0xAE: "Granite Rapids", 0x97: "Alder Lake", 0x9A: "Alder Lake", 0xB7: "Raptor Lake",
    0xBA: "Raptor Lake", 0xBF: "Raptor Lake", 0xAA: "Meteor Lake", 0xC5: "Arrow Lake", 0xC6: "Arrow Lake",
    0xBD: "Lunar Lake",
}  # fmt: skip
"""Models of family 6, from the same file."""


def generation(vendor: str, family: int, model: int) -> str | None:
    """A processor's generation, which the names of virtual machines leave out; None if it is not known."""
    if vendor == "GenuineIntel" and family == 6:
        return _INTEL.get(model)
    return next((name for (own, models), name in _AMD.items() if own == family and model in models), None)


def processor(cpu: str) -> str:
    """A name of it for people: what `describe_machine` calls it, with its generation."""
    short = " ".join(re.sub(r"\(R\)|\(TM\)|CPU|Processor|\d+-Core|@.*", " ", cpu).split())
    found = cpu_fields()
    if not {"vendor_id", "cpu family", "model"} <= found.keys():
        return short
    own = generation(found["vendor_id"], int(found["cpu family"]), int(found["model"]))
    return short if own is None else f"{short} ({own})"


def slug(text: str) -> str:
    """For a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@functools.cache
def fingerprint(root: Path = ROOT) -> str:
    """Of the sources of the kernels and the governor in this tree, without comments and white space: 12 hexadecimal
    digits."""
    hashed = hashlib.sha256()
    for path in sorted(path for folder in TIMED for path in (root / folder).rglob("*") if path.is_file()):
        code = _STRING_OR_COMMENT.sub(lambda found: found[1] or "", path.read_text())
        hashed.update(f"{path.relative_to(root).as_posix()}\0{''.join(code.split())}\0".encode())
    return hashed.hexdigest()[:12]


def commit() -> str | None:
    """The commit of this tree, with `+` if files differ from it; None outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def require_installed() -> None:
    """Raises SystemExit if the pyfly_cpp that is measured is not the one of this tree."""
    installed = Path(pyfly_cpp.__file__).parent
    for path in (ROOT / "pyfly_cpp").rglob("*.py"):
        other = installed / path.relative_to(ROOT / "pyfly_cpp")
        if not other.is_file() or other.read_bytes() != path.read_bytes():
            raise SystemExit(f"{other} is not that of this tree; install the tree first, so that the record names it.")


def _compiler(library: Path) -> str | None:
    """What compiled a library, by the mark that GCC and clang leave."""
    found = re.search(rb"GCC: \([^)\0]*\) [\d.]+|clang version [\d.]+", library.read_bytes())
    return None if found is None else found[0].decode()


def _compilers() -> dict[str, str | None]:
    folders = {"pyfly_cpp": Path(pyfly_cpp.__file__).parent, "llama_cpp": Path(llama_cpp.__file__).parent}
    names = {"pyfly_cpp": "*.so", "llama_cpp": "libggml-cpu*"}
    found = {name: sorted(folder.rglob(names[name])) for name, folder in folders.items()}
    return {name: _compiler(files[0]) if files else None for name, files in found.items()}


def describe(threads: int) -> dict[str, Any]:
    """The conditions of a record."""
    machine = describe_machine()
    return {
        **machine,
        "processor": processor(machine["cpu"]),
        "isa": _native.kernels_isa(),
        "isa_is_forced": "PYFLY_ISA" in os.environ,
        "threads": threads,
        "has_demo_model": embedded_model() is not None,  # `auto` drafts with it
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "llama_cpp_features": llama_cpp.llama_print_system_info().decode(),
        "compilers": _compilers(),
        "commit": commit(),
        "timed_sources": fingerprint(),
    }


SAME = (
    "cpu", "physical_cores", "pyfly_cpp", "llama_cpp_python", "extra_buffers", "kernels", "isa", "isa_is_forced",
    "threads", "has_demo_model", "llama_cpp_features", "compilers", "timed_sources",
)  # fmt: skip
"""Of `describe`: must be equal for steps to stand in one record."""
