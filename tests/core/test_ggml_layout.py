"""What is believed of ggml's structures: nothing, with other declarations than those of the ggml that is installed."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ("ggml_layout.cpp", "abort_guard.cpp")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("c++") is None,
        reason="needs x86-64 Linux and a C++ compiler",
    ),
]

HEADER = "release_ggml.h"
BUFFERS = {
    "another version": (HEADER, "known_api_version = 2", "known_api_version = 3"),
    "a type with a function more": (HEADER, "bool (*is_host)(", "void * more; bool (*is_host)("),
    "a type with a field more": (HEADER, "ggml_backend_dev_t device;", "void * more; ggml_backend_dev_t device;"),
    "a buffer with a function more": (HEADER, "void (*clear)(", "void * more; void (*clear)("),
}
MIXED_BUFFERS = {
    "functions of a type": ("alloc_buffer", "get_alignment"),
    "of a buffer": ("(*set_tensor)", "(*get_tensor)"),
}
OPERATIONS = {
    "parameters with a field more": (HEADER, "size_t work_size;", "void * more; size_t work_size;"),
    "parameters in another order": (HEADER, "int thread, n_threads;", "int n_threads, thread;"),
    "operations with a function more": (
        HEADER,
        "virtual bool work_size(",
        "virtual void more() {} virtual bool work_size(",
    ),
    "types with a function more": (HEADER, "virtual TensorTraits *", "virtual void more() {} virtual TensorTraits *"),
    "types without a destructor": (HEADER, "virtual ~ExtraBufferType() = default;", ""),
}
MIXED_OPERATIONS = {"fields of the parameters": ("size_t work_size;", "void * work;")}


@pytest.fixture(scope="module")
def ggml():
    """Where its headers and libraries are, as the build finds them."""
    command = [sys.executable, str(CSRC / "build_support" / "llama_cpp_python.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return dict(line.split("=", 1) for line in lines)


def found(ggml, folder, name=HEADER, changes=()):
    """What a program prints that is compiled with changed declarations: a line for buffers, one for operations."""
    shutil.copytree(CSRC / "llama", folder / "llama")
    path = folder / "llama" / name
    text = path.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    program = folder / "program"
    subprocess.run([
        "c++", "-std=c++17", f"-I{folder / 'llama'}", f"-I{CSRC}", f"-I{CSRC / 'include'}", f"-I{ggml['INCLUDE']}",
        str(Path(__file__).with_name("ggml_layout.cpp")), *(str(folder / "llama" / name) for name in SOURCES),
        "-o", str(program), f"-L{ggml['LIB']}", f"-Wl,-rpath,{ggml['LIB']}", "-lggml-cpu", "-lggml-base",
    ], check=True)  # fmt: skip
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def swapped(pair):
    return (pair[0], "@@"), (pair[1], pair[0]), ("@@", pair[1])


def test_this_ggml_is_known(ggml, tmp_path):
    assert found(ggml, tmp_path) == ["", ""]


@pytest.mark.parametrize("what", [*BUFFERS, *MIXED_BUFFERS])
def test_other_buffers_are_not(what, ggml, tmp_path):
    name, *change = BUFFERS.get(what, (HEADER,))
    changes = [tuple(change)] if change else swapped(MIXED_BUFFERS[what])
    (buffers,) = found(ggml, tmp_path, name, changes)
    assert "known" in buffers


@pytest.mark.parametrize("what", [*OPERATIONS, *MIXED_OPERATIONS])
def test_other_operations_are_not(what, ggml, tmp_path):
    name, *change = OPERATIONS.get(what, (HEADER,))
    changes = [tuple(change)] if change else swapped(MIXED_OPERATIONS[what])
    buffers, operations = found(ggml, tmp_path, name, changes)
    assert buffers == "" and "known" in operations
