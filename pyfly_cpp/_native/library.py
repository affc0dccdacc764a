"""The compiled extension: finding it, and refusing one that does not fit the llama-cpp-python that is installed, since
another llama.cpp has structures of other sizes, and the process would crash."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from pyfly_cpp._native import headers
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
            f"pyfly-cpp was compiled against llama-cpp-python {compiled}, but {installed} is installed; run `pip "
            f"install llama-cpp-python=={compiled}`, or, to keep {installed}, {_rebuild()}"
        )


def require_headers(compiled: str, package: Path) -> None:
    """Raises VersionMismatchError if the headers of the installed llama-cpp-python are not those that pyfly-cpp was
    compiled against. Headers that are missing tell nothing.

    Args:
        compiled: The digest of those headers (`headers.digest`).
        package: The folder of the package `llama_cpp`.
    """
    folder = headers.include_folder(package)
    try:
        installed = None if folder is None else headers.digest(folder)
    except OSError:
        return
    if installed not in (None, compiled):
        raise VersionMismatchError(
            "the installed llama-cpp-python has the release that pyfly-cpp was compiled against, but other headers "
            f"({folder}/llama.h or others in its folder); if another package has overwritten them, reinstall "
            f"llama-cpp-python; if it is another build, {_rebuild()}"
        )


def _import_llama_cpp() -> ModuleType:
    """Imports `llama_cpp`, which loads libllama: the extension resolves to it."""
    try:
        return importlib.import_module("llama_cpp")
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # AttributeError: a function is missing
        if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
            what = f"llama-cpp-python is not installed; run `pip install {_requirement()}`."
        else:
            what = (
                f"llama-cpp-python does not load ({' '.join(str(error).split())}); run `pip install --force-reinstall "
                f"{_requirement()}`, with the CMAKE_ARGS of your backend if you have one."
            )
        raise VersionMismatchError(what) from None


def _requirement() -> str:
    """What this pyfly-cpp requires of llama-cpp-python, such as llama-cpp-python==0.3.36."""
    try:
        wanted = importlib.metadata.requires("pyfly-cpp") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    found = (re.match(r"llama[-_]cpp[-_]python[^;]*", one) for one in wanted)
    return next((one[0].replace(" ", "") for one in found if one), "llama-cpp-python")


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
    llama_cpp = _import_llama_cpp()
    installed = str(getattr(llama_cpp, "__version__", "of an unknown release"))
    try:
        extension = _import_extension()
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise VersionMismatchError(
            f"pyfly-cpp's extension does not load with llama-cpp-python {installed} ({error}); {_rebuild()}"
        ) from None
    ffi, lib = extension.ffi, extension.lib
    require_release(ffi.string(lib.pyfly_llama_cpp_python_version()).decode(), installed)
    if lib.pyfly_abi_version() != ABI_VERSION:
        raise VersionMismatchError(
            "pyfly-cpp's extension and its Python files are of different versions; run `pip install .` again."
        )
    require_headers(ffi.string(lib.pyfly_llama_headers()).decode(), Path(str(llama_cpp.__file__)).parent)
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
