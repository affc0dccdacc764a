"""Tiny models and sample data for the tests of evaluation and bench."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models" / "tiny" / "tiny-llama-target-f16.gguf"
DRAFT = ROOT / "models" / "tiny" / "tiny-llama-draft-f16.gguf"


@pytest.fixture(scope="session")
def data():
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def containment():
    """What contains model code on this machine; it may be none, since what the tests run is harmless."""
    from pyfly_cpp.measure.tasks.sandbox import SandboxError, require_containment

    try:
        require_containment()
    except SandboxError:
        return "none"
    return "bubblewrap"


@pytest.fixture(scope="session")
def tiny():
    """Paths of a target and its draft."""
    if not TARGET.exists():
        pytest.skip(f"{TARGET.name} is not there")
    return TARGET, DRAFT


@pytest.fixture(scope="session")
def generator(tiny):
    """One loaded target with its draft; tests set what they need by settings."""
    from pyfly_cpp import DraftModel, FlyLlama
    from pyfly_cpp.decoding.resolve import Resolved
    from pyfly_cpp.measure.generator import Generator

    target, draft = tiny
    llm = FlyLlama(str(target), n_ctx=1024, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False)
    yield Generator(llm, Resolved((DraftModel(str(draft)),)))
    llm.close()


@pytest.fixture
def model_arguments(tiny):
    """Command-line arguments that load the tiny models."""
    target, draft = tiny
    return ["-m", str(target), "-d", str(draft), "-c", "1024", "-t", "1"]


@pytest.fixture(scope="module")
def generators(tiny_target_f32, tiny):
    """One request after the other, and three at once, with an F32 model whose texts hang on no batch's size."""
    import llama_cpp

    from pyfly_cpp import DraftModel, FlyBatch, FlyLlama
    from pyfly_cpp.decoding.resolve import Resolved
    from pyfly_cpp.measure.generator import Generator
    from pyfly_cpp.measure.parallel import ParallelGenerator

    f32 = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "type_k": f32, "type_v": f32,
               "flash_attn": False}  # fmt: skip
    drafters = Resolved((DraftModel(str(tiny[1])),))
    llm = FlyLlama(tiny_target_f32, **options)
    batch = FlyBatch(tiny_target_f32, 3, **options)
    yield Generator(llm, drafters), ParallelGenerator(batch, drafters)
    batch.close()
    llm.close()
