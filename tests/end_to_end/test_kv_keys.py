"""What a context holds is used only by what would compute the same: adapters, settings, states, prompt caches."""

from __future__ import annotations

import copy
import ctypes
import pickle
import shutil
from contextlib import closing

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf, write_adapter
from heads import HYBRID
from llama_cpp.llama_cache import LlamaRAMCache

from pyfly_cpp import FlyBatch, FlyLlama
from pyfly_cpp.engine.adapters import Applied, applied

PROMPT = "Tom has 3 apples and buys 4 more. How many apples does Tom have? " * 4
OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
Q8 = {"type_k": 8, "type_v": 8, "flash_attn": True}


def answer(llm, prompt=PROMPT):
    return llm.create_completion(prompt, max_tokens=24, temperature=0)["choices"][0]["text"]


def fresh(path, **options):
    with closing(FlyLlama(path, **{**OPTIONS, **options})) as llm:
        return answer(llm)


def scale(llm, *scales):
    """Sets the scale of the adapter of an object by llama.cpp's own function; without one, takes it away."""
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(llm._lora_adapter)
    assert llama_cpp.llama_set_adapters_lora(llm._ctx.ctx, adapters, len(scales), (ctypes.c_float * 1)(*scales)) == 0


def control(llm, strength):
    n, layers = llm.n_embd(), llama_cpp.llama_model_n_layer(llm._model.model) - 1
    data = None if strength is None else (ctypes.c_float * (n * layers))(*[strength] * (n * layers))
    assert llama_cpp.llama_set_adapter_cvec(llm._ctx.ctx, data, n * layers, n, 1, layers) == 0


@pytest.fixture(scope="module")
def strong(tmp_path_factory, tiny_target):
    """An adapter of keys and values, whose scale changes the text."""
    names = [f"blk.{i}.{kind}" for i in range(6) for kind in ("ffn_up", "attn_k", "attn_v")]
    path = tmp_path_factory.mktemp("strong") / "lora.gguf"
    return write_adapter(path, tiny_target, names, rank=8, seed=1, strength=0.15)


# ---- Adapters that change ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_a_prefix_is_read_again_with_another_adapter(tiny_target, strong, drafter):
    expected = {s: fresh(tiny_target, lora_path=strong, lora_scale=s) for s in (1.0, 0.4)}
    alone = fresh(tiny_target)
    assert len({*expected.values(), alone}) == 3, "the scales make no difference to the text"
    with closing(FlyLlama(tiny_target, lora_path=strong, drafter=drafter, **OPTIONS)) as llm:
        assert answer(llm) == expected[1.0]
        scale(llm, 0.4)
        assert answer(llm) == expected[0.4]
        scale(llm)
        assert answer(llm) == alone
        scale(llm, 0.0)  # the same: nothing is read again
        llm.reset_stats()
        assert answer(llm) == alone and llm.stats.prefilled < 2
        control(llm, 1.0)
        changed = answer(llm)
        assert changed != alone
        control(llm, None)
        assert answer(llm) == alone


def test_requests_of_a_batch_share_no_prefix_of_another_adapter(tiny_target, strong):
    with FlyBatch(tiny_target, 2, lora_path=strong, **OPTIONS) as batch:

        def ask():
            (answers,) = batch.complete([PROMPT], max_tokens=24, temperature=0)
            return answers["choices"][0]["text"]

        first = ask()
        assert ask() == first
        running = batch.submit("Once upon", max_tokens=100, temperature=0, stream=True)
        next(iter(running))
        scale(batch.llama, 0.02)
        changed = ask()
        running.cancel()
        assert changed != first
    with FlyBatch(tiny_target, 2, lora_path=strong, lora_scale=0.02, **OPTIONS) as batch:
        assert ask() == changed


def test_a_hybrid_model_uses_no_states_of_another_adapter(tmp_path):
    names = ("blk.0.ffn_up", "blk.1.ffn_down")
    adapter = write_adapter(tmp_path / "lora.gguf", HYBRID, names, rank=8, seed=1, strength=0.3)
    expected = {s: fresh(HYBRID, lora_path=adapter, lora_scale=s) for s in (1.0, 0.05)}
    assert expected[1.0] != expected[0.05]
    with closing(FlyLlama(HYBRID, lora_path=adapter, **OPTIONS)) as llm:
        assert answer(llm) == answer(llm) == expected[1.0]
        scale(llm, 0.05)
        assert answer(llm) == expected[0.05]


def test_states_that_a_hybrid_model_kept_go_with_the_adapters(tiny_qwen35):
    """Also where the caller evaluates the same tokens again, with others."""
    tokens = [(i * 37) % 1400 + 30 for i in range(300)]
    with FlyLlama(tiny_qwen35, **OPTIONS) as llm:
        answer(llm, tokens)
        control(llm, 1.0)
        llm.reset()
        llm.eval(tokens)
        llm.reset_stats()
        answer(llm, [*tokens[:290], 77, 77])
        assert llm.stats.prefilled >= 290


def test_what_a_context_applies(tiny_target, strong, tmp_path):
    with closing(FlyLlama(tiny_target, **OPTIONS)) as llm:
        assert applied(llm._ctx.ctx) == Applied()
    moved = shutil.copy(strong, tmp_path / "moved.gguf")  # a Path
    with closing(FlyLlama(tiny_target, lora_path=strong, lora_scale=0.5, **OPTIONS)) as llm:
        one = applied(llm._ctx.ctx)
        assert [scale for _, scale in one.loras] == [0.5]
    with closing(FlyLlama(tiny_target, lora_path=moved, lora_scale=0.5, **OPTIONS)) as llm:
        assert applied(llm._ctx.ctx) == one, "the content counts, not the place"
    with closing(FlyLlama(tiny_target, **OPTIONS)) as llm:
        assert applied(llm._ctx.ctx) == Applied(), "a context where another one was"


# ---- States --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saved, loaded, named",
    [
        ({"lora": 1.0}, {}, "adapter"),
        ({}, {"lora": 1.0}, "adapter"),
        ({"lora": 1.0}, {"lora": 0.5}, "adapter"),
        ({}, {"rope_freq_base": 500.0}, "RoPE"),
        ({}, {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-2}}, "kv_overrides"),
        ({}, {"type_k": 8}, "types of the K or V cache"),
        (Q8, {**Q8, "environment": "1"}, "LLAMA_ATTN_ROT_DISABLE"),
        ({}, {"flash_attn": True, "kernels": "stock"}, "layout"),
    ],
)
def test_a_state_is_loaded_where_the_same_is_computed(tiny_target, strong, monkeypatch, saved, loaded, named):
    def load(lora=None, environment=None, **options):
        if environment is not None:
            monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", environment)
        adapter = {} if lora is None else {"lora_path": strong, "lora_scale": lora}
        return closing(FlyLlama(tiny_target, **{**OPTIONS, "kernels": "stock", **adapter, **options}))

    with load(**saved) as llm:
        answer(llm)
        state = pickle.loads(pickle.dumps(llm.save_state()))
    with load(**saved) as llm:
        llm.load_state(state)
        llm.reset_stats()
        answer(llm)
        assert llm.stats.prefilled == 0
    with load(**loaded) as llm:
        answer(llm, "Once upon a time")
        before = llm.input_ids[: llm.n_tokens].tolist()
        with pytest.raises(ValueError, match=named):
            llm.load_state(state)
        assert llm.input_ids[: llm.n_tokens].tolist() == before


def test_a_state_of_another_model(tiny_target, tmp_path):
    def change(arrays):
        for name in arrays:
            if "attn_v" in name:
                arrays[name] = arrays[name] * np.float16(0.5)

    other = str(edit_gguf(tiny_target, tmp_path / "other.gguf", tensors=change))
    same = shutil.copy(tiny_target, tmp_path / "same.gguf")
    with closing(FlyLlama(tiny_target, **OPTIONS)) as llm:
        expected = answer(llm)
        state = llm.save_state()
    with closing(FlyLlama(other, **OPTIONS)) as llm, pytest.raises(ValueError, match="another model"):
        llm.load_state(state)
    with closing(FlyLlama(same, **OPTIONS)) as llm:
        llm.load_state(state)
        assert answer(llm) == expected


def test_a_state_tells_what_it_was_computed_with(tiny_target, strong):
    """Not what the context applies when it is saved."""
    with closing(FlyLlama(tiny_target, lora_path=strong, **OPTIONS)) as llm:
        first = answer(llm)
        scale(llm, 0.02)
        state = llm.save_state()
        with pytest.raises(ValueError, match="adapter"):
            llm.load_state(state)
        scale(llm, 1.0)
        llm.load_state(state)
        assert answer(llm) == first


def test_states_of_plain_objects_do_not_tell(tiny_target):
    with closing(llama_cpp.Llama(tiny_target, **OPTIONS)) as plain:
        expected = answer(plain)
        state = plain.save_state()
    with closing(FlyLlama(tiny_target, flash_attn=False, **OPTIONS)) as llm:
        llm.load_state(state)
        assert answer(llm) == expected
        ours = llm.save_state()
    with closing(llama_cpp.Llama(tiny_target, **OPTIONS)) as plain:
        plain.load_state(copy.copy(ours))
        assert answer(plain) == expected


def test_a_cache_serves_those_alone_that_compute_the_same(tiny_target, strong):
    expected, cache = fresh(tiny_target), LlamaRAMCache()
    with closing(FlyLlama(tiny_target, lora_path=strong, **OPTIONS)) as llm:
        llm.set_cache(cache)
        assert answer(llm) != expected
    with closing(FlyLlama(tiny_target, **OPTIONS)) as llm:
        llm.set_cache(cache)
        assert answer(llm) == expected
