"""The pure core under AddressSanitizer and UndefinedBehaviorSanitizer, built with warnings as errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
)
def test_core_under_sanitizers(tmp_path):
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DPYFLY_CORE_ONLY=ON", "-DPYFLY_WERROR=ON",
        "-DPYFLY_SANITIZE=address,undefined", "-DCMAKE_BUILD_TYPE=Debug",
    ]  # fmt: skip
    for command in (configure, ["cmake", "--build", str(tmp_path), "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for name, level in (
        ("pyfly_core_test", "avx512"),
        ("pyfly_core_test", "avx2"),
        ("pyfly_core_test", "baseline"),
        ("pyfly_governor_test", "avx512"),
        ("pyfly_thread_policy_test", "baseline"),
        ("pyfly_header_test", "baseline"),
    ):
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "PYFLY_SIMD": level}
        done = subprocess.run([str(tmp_path / name)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
