"""Servers of the tests, with the tiny models."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if all(find_spec(name) for name in ("starlette", "uvicorn", "prometheus_client", "pydantic", "httpx")):
    from serving import EXACT, running

    from pyfly_cpp import DraftModel, FlyBatch, FlyLlama
else:  # pip install '.[server]'
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def batch(tiny_target_f32, tiny_draft):
    """Four texts at once, with drafts."""
    with FlyBatch(tiny_target_f32, 4, drafter=DraftModel(tiny_draft, draft_max=4), **EXACT) as batch:
        yield batch


@pytest.fixture(scope="session")
def narrow_batch(tiny_target_f32):
    """One text at once, of up to 16,384 tokens, without drafts."""
    with FlyBatch(tiny_target_f32, 1, **{**EXACT, "n_ctx": 16384}) as batch:
        yield batch


@pytest.fixture(scope="session")
def server(batch):
    """A server for tests that leave it as it was."""
    with running(batch) as one:
        yield one
        one.until_idle()


@pytest.fixture(scope="session")
def alone(tiny_target_f32):
    """The model without a server and without drafts."""
    llm = FlyLlama(tiny_target_f32, **EXACT)
    yield llm
    llm.close()
