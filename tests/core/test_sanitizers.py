"""The pure core under the address, undefined behaviour and thread sanitizers, built with warnings as errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
)


def run(command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr


def build(folder, sanitizers, *targets):
    run([
        "cmake", "-S", str(ROOT), "-B", str(folder), "-DPYFLY_CORE_ONLY=ON", "-DPYFLY_WERROR=ON",
        f"-DPYFLY_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug",
    ])  # fmt: skip
    run(["cmake", "--build", str(folder), "--parallel", "2", "--target", *(targets or ["all"])])


def test_core_under_sanitizers(tmp_path):
    programs = (
        ("pyfly_core_test", "avx512"),
        ("pyfly_core_test", "avx2"),
        ("pyfly_core_test", "baseline"),
        ("pyfly_governor_test", "avx512"),
        ("pyfly_thread_policy_test", "baseline"),
        ("pyfly_cross_vocabulary_test", "baseline"),
        ("pyfly_kernels_test", "baseline"),
        ("pyfly_attention_test", "baseline"),
        ("pyfly_span_groups_test", "baseline"),
        ("pyfly_parts_test", "baseline"),
        ("pyfly_header_test", "baseline"),
    )
    build(tmp_path, "address,undefined", *sorted({name for name, _ in programs}))
    for name, level in programs:
        run([str(tmp_path / name)], ASAN_OPTIONS="detect_leaks=1", PYFLY_SIMD=level)


def test_several_threads(tmp_path):
    build(tmp_path, "thread", "pyfly_core_test")
    run([str(tmp_path / "pyfly_core_test")], TSAN_OPTIONS="halt_on_error=1")
