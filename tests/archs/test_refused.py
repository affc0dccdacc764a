"""What llama.cpp loads and cannot run is refused with the reason: nothing ends the process."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf")

from described import HEADS, N_CTX, POPULAR, make

from pyfly_cpp import MTP, DraftModel, FlyBatch, FlyLlama, IncompatibleDraftError

SETTINGS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


def model(name, folder):
    return str(make(name, {**POPULAR, **HEADS}[name], folder / f"{name}.gguf"))


def test_an_mtp_block_runs_where_the_model_does_not_rotate_in_sections(tmp_path):
    llm = FlyLlama(model("glm4moe", tmp_path), drafter=MTP(), draft_max=1, adaptive=False, n_ctx=N_CTX, **SETTINGS)
    assert len([token for token, _ in zip(llm.generate([1, 2, 3], temp=0.0), range(20))]) == 20
    assert llm.stats.drafted > 0
    llm.close()


def test_an_mtp_block_whose_graph_does_not_rotate_in_sections_is_refused(tmp_path):
    """llama.cpp ends the process at the first draft."""
    path = model("glm4moe-sections", tmp_path)
    with pytest.raises(IncompatibleDraftError, match="sections"):
        FlyLlama(path, drafter=MTP(), n_ctx=N_CTX, **SETTINGS)
    llm = FlyLlama(path, drafter="auto", n_ctx=N_CTX, **SETTINGS)  # another drafter
    assert not isinstance(llm.drafter, MTP)
    llm.close()


def test_a_tensor_that_the_mtp_graph_needs_is_named(tmp_path):
    """The loader takes it for optional."""
    with pytest.raises(ValueError, match=r"lacks the tensor blk\.2\.attn_qkv\.weight"):
        FlyLlama(model("mimo2", tmp_path), drafter=MTP(), n_ctx=N_CTX, **SETTINGS)


# ---- Graphs that are right for the first row of a batch alone --------------------------------------------------------


def test_chameleon_is_refused(tmp_path):
    """Its graph sets the rows of image tokens, of which this description has none."""
    path = str(make("chameleon", {}, tmp_path / "chameleon.gguf"))
    for opened in (FlyLlama, FlyBatch):
        with pytest.raises(ValueError, match="chameleon"):
            opened(path, n_ctx=N_CTX, **SETTINGS)
    with pytest.raises(ValueError, match="chameleon"):
        FlyLlama(model("llama", tmp_path), drafter=DraftModel(path), n_ctx=N_CTX, **SETTINGS)
