"""The compiled extension: finding it, and refusing one that does not fit what is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import shlex
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import llama_cpp  # loads libllama, which the extension below resolves to

from pyfly_cpp.errors import VersionMismatchError

ABI_VERSION = 12


def _rebuild() -> str:
    """The end of a message about an extension for another release: the command that compiles it for this one."""
    try:
        origin = json.loads(importlib.metadata.distribution("pyfly-cpp").read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        origin = {}
    source = url2pathname(urlparse(origin["url"]).path) if "dir_info" in origin else "pyfly-cpp"
    return (
        "run `pip install scikit-build-core cmake ninja cffi && pip install --force-reinstall --no-deps --no-cache-dir "
        f"--no-build-isolation --no-binary pyfly-cpp {shlex.quote(source)}` to compile it for that release."
    )


def require_release(compiled: str, installed: str) -> None:
    """Raises VersionMismatchError unless pyfly-cpp was compiled against the llama-cpp-python that is installed. Local
    labels, such as +cu124, tell the backend, and do not count."""
    if compiled != installed.split("+")[0]:
        raise VersionMismatchError(
            f"pyfly-cpp was compiled against llama-cpp-python {compiled}, but {installed} is installed; {_rebuild()}"
        )


def _import_extension() -> Any:
    """The compiled extension: in this package, or, when Python was started in a source checkout, the installed one."""
    try:
        return importlib.import_module("pyfly_cpp._pyfly")
    except ModuleNotFoundError:
        pass
    try:
        files = importlib.metadata.files("pyfly-cpp") or []
        path = next(str(f.locate()) for f in files if f.name.startswith("_pyfly."))
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        raise ModuleNotFoundError(
            "pyfly-cpp's extension is not built; run `pip install .` in its source folder."
        ) from None
    spec = importlib.util.spec_from_file_location("pyfly_cpp._pyfly", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load() -> tuple[Any, Any]:
    try:
        extension = _import_extension()
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise VersionMismatchError(
            f"pyfly-cpp's extension does not load with llama-cpp-python {llama_cpp.__version__} ({error}); "
            + _rebuild()
        ) from None
    ffi, lib = extension.ffi, extension.lib
    require_release(ffi.string(lib.pyfly_llama_cpp_python_version()).decode(), llama_cpp.__version__)
    if lib.pyfly_abi_version() != ABI_VERSION:
        raise VersionMismatchError(
            "pyfly-cpp's extension and its Python files are of different versions; run `pip install .` again."
        )
    return ffi, lib


ffi, lib = _load()


def _words(prefix: str) -> dict[str, int]:
    """The constants of an enum of pyfly.h in their order: number by word, which is the rest of the name in lower
    case."""
    constants = {name[len(prefix) :].lower(): int(getattr(lib, name)) for name in dir(lib) if name.startswith(prefix)}
    return dict(sorted(constants.items(), key=lambda constant: constant[1]))


GATE_KINDS = _words("PYFLY_GATE_")
LOOKUP_MATCHES = _words("PYFLY_LOOKUP_")
ORIGINS = _words("PYFLY_ORIGIN_")
REASONS = _words("PYFLY_REASON_")
WINDOW_RULES = _words("PYFLY_WINDOW_")

MAX_TOP: int = lib.PYFLY_MAX_TOP
"""Most tokens that are looked for in a row."""

MAX_LOOKUP: int = lib.PYFLY_MAX_LOOKUP
"""Most tokens of other texts that prompt lookup looks in."""

simd_level: str = ffi.string(lib.pyfly_simd_level()).decode()
"""Instruction set of the row statistics on this machine: "avx512", "avx2" or "baseline"."""
