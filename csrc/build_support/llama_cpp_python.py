"""What the build needs to know of the llama-cpp-python it compiles against.

Run by CMake as a script, it prints one `KEY=value` line each for the release and its folders. Imported by
scikit-build-core as the provider of the `dependencies` field, it pins the wheel to that very release: llama.h changes
weekly, so a built extension fits one release only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import runpy
from pathlib import Path
from typing import Any

OLDEST_SUPPORTED = "0.3.35"
"""The oldest release whose llama.h has what csrc/ calls; csrc/llama/release.h names it, too."""

RUNTIME_DEPENDENCIES = [
    "numpy>=1.24",
    "cffi>=1.16",
    "jinja2>=3.1",
    "llguidance>=1.9,<2; python_version >= '3.10'",
    # The last one for Python 3.9. It misreads patterns that begin with a quotation mark.
    "llguidance>=1.3,<1.4; python_version < '3.10'",
    "typing_extensions>=4.5",
]

_HEADERS = runpy.run_path(str(Path(__file__).parents[2] / "pyfly_cpp" / "_native" / "headers.py"))


def release() -> str:
    """The installed release, such as "0.3.36", without a local label; raises SystemExit with a remedy if there is none
    that fits."""
    try:
        version = importlib.metadata.version("llama-cpp-python").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"llama-cpp-python is not installed in the build environment; install {OLDEST_SUPPORTED} or newer "
            "first, or build with isolation (plain `pip install .`)."
        ) from None
    if _key(version) < _key(OLDEST_SUPPORTED):
        raise SystemExit(
            f"llama-cpp-python {version} is too old: pyfly-cpp needs {OLDEST_SUPPORTED} or newer. Upgrade it (with the "
            "CMAKE_ARGS of your backend), then install pyfly-cpp again."
        )
    return version


def _key(version: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:3])


def package_folder() -> Path:
    """The folder of the llama_cpp package. It is located, not imported: importing would load the backend."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the llama_cpp package of llama-cpp-python cannot be found; reinstall llama-cpp-python.")
    return Path(spec.submodule_search_locations[0])


def include_folder() -> Path:
    """The folder with llama.h and ggml.h."""
    folder = _HEADERS["include_folder"](package_folder())
    if folder is None:
        raise SystemExit("llama-cpp-python came without llama.h; reinstall it from source.")
    return Path(folder)


def digest() -> str:
    """`headers.digest` of the headers in `include_folder`; raises SystemExit with a remedy if it cannot be formed."""
    try:
        return str(_HEADERS["digest"](include_folder()))
    except OSError as error:
        raise SystemExit(
            f"llama-cpp-python's header {error.filename} cannot be read ({error.strerror}); reinstall llama-cpp-python."
        ) from None


def dynamic_metadata(field: str, settings: dict[str, Any] | None = None, *_: Any) -> list[str]:
    """scikit-build-core's provider call for `dependencies`."""
    if field != "dependencies":
        raise ValueError(f"this provider knows only the field 'dependencies', not {field!r}")
    return [f"llama-cpp-python=={release()}", *RUNTIME_DEPENDENCIES]


if __name__ == "__main__":
    print(f"RELEASE={release()}")
    print("NUMBER={}{:02}{:02}".format(*_key(release())))
    print(f"INCLUDE={include_folder()}")
    print(f"DIGEST={digest()}")
    print(f"LIB={package_folder() / 'lib'}")
