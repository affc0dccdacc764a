"""The suites that load models, with all and with half of the tiny models' layers on a GPU.

`pytest -m device -n 0` runs them where llama-cpp-python was built with a backend for one and there is one; other
machines skip. Tests marked `alike` compare log-probabilities closely, or sampled texts, and are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

ROOT = Path(__file__).resolve().parents[1]

SUITES = {
    "lossless": ["end_to_end/test_lossless.py", "end_to_end/test_sampled_drafts.py"],
    "draft models": ["end_to_end/test_draft_model.py", "end_to_end/test_cross_vocabulary.py"],
    "heads": ["end_to_end/test_draft_heads.py"],
    "recurrent": ["end_to_end/test_recurrent.py", "end_to_end/test_recurrent_rollback.py"],
    "sliding windows": ["end_to_end/test_sliding_window.py"],
    "several requests": ["end_to_end/test_parallel.py", "end_to_end/test_several_requests.py"],
    "shared beginnings": ["end_to_end/test_shared_beginnings.py"],
    "drop-in": ["end_to_end/test_drop_in.py", "end_to_end/test_response_format.py"],
    "life": ["end_to_end/test_lifetime.py", "end_to_end/test_threads.py"],
    "costs": ["end_to_end/test_costs.py"],
    "bad input": ["end_to_end/test_bad_input.py"],
    "measure": ["measure/test_evaluation.py", "measure/test_bench.py"],
    "server": ["serve"],
    "batches at random": ["fuzz/test_batches.py", "fuzz/test_histories.py"],
}
SHARES = {"all": -1, "half": 3}
"""Layers on the device. The tiny models have 5 and 6, and llama.cpp counts the output as one."""


@pytest.mark.device
@pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="llama-cpp-python has no backend for a GPU here")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("suite", SUITES)
def test_suite_on_the_device(suite, share):
    files = [str(ROOT / "tests" / name) for name in SUITES[suite]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow or fuzz", *files],
        env={**os.environ, "PYFLY_TEST_GPU_LAYERS": str(SHARES[share])},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout.splitlines()[-1] if done.stdout else done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
