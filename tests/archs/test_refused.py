"""What llama.cpp loads and cannot run is refused with the reason: nothing ends the process."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from described import HEADS, N_CTX, POPULAR, make
from gguf_write import write

from pyfly_cpp import MTP, DraftModel, FlyBatch, FlyLlama
from pyfly_cpp.errors import IncompatibleDraftError

SETTINGS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}


def model(name, folder, left_out=()):
    return str(make(name, {**POPULAR, **HEADS}[name], folder / f"{name}.gguf", left_out))


@pytest.mark.parametrize("name", ["glm4moe", "mimo2"])
def test_an_mtp_block_that_has_all_its_graph_needs_runs(name, tmp_path):
    llm = FlyLlama(model(name, tmp_path), drafter=MTP(), draft_max=1, adaptive=False, n_ctx=N_CTX, **SETTINGS)
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
        FlyLlama(model("mimo2", tmp_path, ["attn_qkv"]), drafter=MTP(), n_ctx=N_CTX, **SETTINGS)


def test_an_mtp_block_without_a_graph_is_refused(tmp_path):
    """llama.cpp loads the block of GLM-5, and then has no graph of it."""
    writer = gguf.GGUFWriter(str(tmp_path / "glm5.gguf"), "glm5-next")
    writer.add_block_count(2)
    writer.add_uint32("glm5-next.nextn_predict_layers", 1)
    names = ("0.attn_norm", "1.nextn.eh_proj", "1.nextn.enorm", "1.nextn.hnorm")
    write(writer, {f"blk.{name}.weight": np.ones(32, np.float32) for name in names})
    with pytest.raises(IncompatibleDraftError, match=r"cannot run the 1 NextN layer.*glm5-next"):
        FlyLlama(str(tmp_path / "glm5.gguf"), drafter=MTP(), n_ctx=N_CTX, **SETTINGS)


# ---- Graphs that give wrong rows for batches of several tokens -------------------------------------------------------


@pytest.mark.parametrize("name", ["chameleon", "cogvlm"])
def test_what_gives_wrong_rows_is_refused(name, tmp_path):
    path = str(make(name, {}, tmp_path / f"{name}.gguf"))
    for opened in (FlyLlama, FlyBatch):
        with pytest.raises(ValueError, match=f"architecture {name}"):
            opened(path, n_ctx=N_CTX, **SETTINGS)
    with pytest.raises(ValueError, match=f"architecture {name}"):
        FlyLlama(model("llama", tmp_path), drafter=DraftModel(path), n_ctx=N_CTX, **SETTINGS)
