"""pyfly_cpp beside a llama-cpp-python that is missing, damaged or another one: one sentence at import, and no crash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

import pyfly_cpp
from pyfly_cpp._native import headers

PACKAGE = Path(llama_cpp.__file__).parent
LIBLLAMA = PACKAGE / "lib" / "libllama.so"


@pytest.fixture
def other(tmp_path):
    """A folder with a llama_cpp package of links to the installed one, and its headers."""
    package = tmp_path / "llama_cpp"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in ("lib", "__pycache__"):
            os.symlink(path, package / path.name)
    (package / "lib").mkdir()
    for path in (PACKAGE / "lib").iterdir():
        os.symlink(path, package / "lib" / path.name)
    installed = headers.include_folder(PACKAGE)
    if installed is not None:
        shutil.copytree(installed, tmp_path / "include")
    return tmp_path


def imported(folder, code="import pyfly_cpp"):
    """The last line on stderr of a program that finds llama_cpp in this folder first; empty if it ends well."""
    path = os.pathsep.join((str(folder), str(Path(pyfly_cpp.__file__).parents[1])))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), f"ended by {done.returncode}: {done.stderr}"
    assert (done.returncode == 1) == bool(done.stderr), done.stderr
    return done.stderr.strip().splitlines()[-1] if done.stderr else ""


def replace(link, change):
    """The file that a link leads to, changed by a function of its bytes, in place of the link."""
    content = link.read_bytes()
    assert change(content) != content
    link.unlink()
    link.write_bytes(change(content))


def test_the_same_build_in_another_folder(other):
    assert imported(other) == ""


def test_no_llama_cpp(tmp_path):
    error = imported(tmp_path, "import sys; sys.modules['llama_cpp'] = None; import pyfly_cpp")
    assert "VersionMismatchError" in error and f"pip install llama-cpp-python=={llama_cpp.__version__}" in error


def test_a_package_that_llama_cpp_needs_is_missing(tmp_path):
    error = imported(tmp_path, "import sys; sys.modules['diskcache'] = None; import pyfly_cpp")
    assert "VersionMismatchError" in error and "diskcache" in error and "pip install" in error


def test_a_command_without_llama_cpp(tmp_path):
    code = "import sys; sys.argv = ['pyfly-cpp', 'doctor']; sys.modules['llama_cpp'] = None; import pyfly_cpp"
    assert imported(tmp_path, code).startswith("Error: llama-cpp-python is not installed")


def test_no_library(other):
    shutil.rmtree(other / "llama_cpp" / "lib")
    (other / "llama_cpp" / "lib").mkdir()
    error = imported(other)
    assert "VersionMismatchError" in error and "llama" in error and "--force-reinstall" in error


@pytest.mark.skipif(headers.include_folder(PACKAGE) is None, reason="llama-cpp-python came without headers")
def test_another_build_of_this_release(other):
    """A structure of llama.h has one more field."""
    header = other / "include" / "llama.h"
    replace(header, lambda text: text.replace(b"struct llama_model_params {", b"struct llama_model_params { int more;"))
    error = imported(other)
    assert "VersionMismatchError" in error and str(header) in error and "pip install" in error
    shutil.rmtree(other / "include")
    assert imported(other) == ""  # nothing to compare with


@pytest.mark.skipif(headers.include_folder(PACKAGE) is None, reason="llama-cpp-python came without headers")
def test_the_build_names_a_header_that_is_missing(other):
    (other / "include" / "gguf.h").unlink()
    script = Path(__file__).parents[1] / "csrc" / "build_support" / "llama_cpp_python.py"
    environment = {**os.environ, "PYTHONPATH": str(other)}
    done = subprocess.run([sys.executable, script], cwd=other, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert str(other / "include" / "gguf.h") in done.stderr and "reinstall llama-cpp-python" in done.stderr


@pytest.mark.skipif(headers.include_folder(PACKAGE) is None, reason="llama-cpp-python came without headers")
def test_line_ends_of_headers_do_not_count(other):
    replace(other / "include" / "llama.h", lambda text: text.replace(b"\n", b"\r\n"))
    assert imported(other) == ""


@pytest.mark.skipif(not LIBLLAMA.is_file(), reason="the library has another name here")
@pytest.mark.parametrize("function", [b"llama_print_system_info", b"llama_graph_reserve"])
def test_a_library_without_a_function(other, function):
    """One that llama_cpp takes from it, and one that our extension alone takes."""
    for link in (other / "llama_cpp" / "lib").glob("libllama.*"):
        replace(link, lambda content: content.replace(function, b"_" * len(function)))
    error = imported(other)
    assert "VersionMismatchError" in error and function.decode() in error and "pip install" in error
