"""The C++ tests, run by ctest under the address, undefined behaviour and thread sanitizers; warnings are errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
    ),
]


def run(command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr


def build(folder, sanitizers, *targets):
    run([
        "cmake", "-S", str(ROOT), "-B", str(folder), "-DPYFLY_CORE_ONLY=ON", "-DPYFLY_WERROR=ON",
        f"-DPYFLY_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug", f"-DPython_EXECUTABLE={sys.executable}",
    ])  # fmt: skip
    run(["cmake", "--build", str(folder), "--parallel", "2", "--target", *targets])


def run_tests(folder, *selection, **environment):
    run(["ctest", "--test-dir", str(folder), "--output-on-failure", *selection], **environment)


def test_core_under_sanitizers(tmp_path):
    build(tmp_path, "address,undefined", "all")
    run_tests(tmp_path, ASAN_OPTIONS="detect_leaks=1")
    listed = subprocess.run(["ctest", "--test-dir", str(tmp_path), "-N"], capture_output=True, text=True, check=True)
    written = {path.stem[: -len("_test")] for path in Path(__file__).parent.glob("*_test.c*")}
    assert written <= set(re.findall(r"Test +#\d+: (\w+)", listed.stdout))


def test_several_threads(tmp_path):
    """Not packed_buffers: ThreadSanitizer does not know where the threads of libggml wait for each other."""
    build(tmp_path, "thread", "pyfly_core_test", "pyfly_cpu_attention_test")
    run_tests(tmp_path, "--tests-regex", "^(core|cpu_attention)$", TSAN_OPTIONS="halt_on_error=1")


@pytest.mark.fuzz
def test_attention_of_random_shapes(tmp_path):
    build(tmp_path, "address,undefined", "pyfly_cpu_attention_test")
    cases = os.environ.get("PYFLY_FUZZ_CASES", "1000")
    run_tests(tmp_path, "--tests-regex", "^cpu_attention$", PYFLY_FUZZ_CASES=cases)
