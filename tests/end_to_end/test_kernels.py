"""Packed weights in real models: the same bits in every batch, so exact decoding gives equal texts."""

from __future__ import annotations

from contextlib import closing

import llama_cpp
import numpy as np
import pytest

from pyfly_cpp import DraftModel, FlyLlama, PromptLookup, _native, extra_buffers, kernels

pytestmark = pytest.mark.skipif(kernels._WHY_NOT is not None, reason=f"no kernels: {kernels._WHY_NOT}")

ALL = kernels.Verdict(tuple(_native.kernel_types()), "every type")
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


@pytest.fixture(autouse=True)
def every_type(monkeypatch):
    """Whatever is faster on this machine: all types are packed where a model asks for kernels."""
    monkeypatch.setattr(kernels, "verdict", lambda: ALL)


def rows_of(llm, tokens, sizes):
    """Logits that follow each token, evaluated in batches of these sizes; [tokens][vocabulary]."""
    memory = llama_cpp.llama_get_memory(llm._ctx.ctx)
    llama_cpp.llama_memory_clear(memory, True)
    batch = llama_cpp.llama_batch_init(64, 0, 1)
    out, position = [], 0
    for size in sizes:
        batch.n_tokens = size
        for i in range(size):
            batch.token[i], batch.pos[i], batch.logits[i] = tokens[position + i], position + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert llama_cpp.llama_decode(llm._ctx.ctx, batch) == 0
        shape = (size, llm.n_vocab())
        out.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm._ctx.ctx), shape=shape).copy())
        position += size
    llama_cpp.llama_batch_free(batch)
    return np.concatenate(out)


@pytest.mark.parametrize("kind", ALL.types, ids=str)
@pytest.mark.parametrize("n_rows", [1, 3, 8, 17, 64])
def test_products_are_as_right_as_those_of_llama_cpp(kind, n_rows):
    ours = _native.try_kernels(kind, 128, n_rows, 2, 1, is_packed=True)
    stock = _native.try_kernels(kind, 128, n_rows, 2, 1, is_packed=False)
    assert ours.error <= max(1.2 * stock.error, 1e-6) and ours.us > 0


def test_a_trial_of_what_is_not_there_is_refused():
    for arguments in ((0, 64, 1, 1, 1), (2, 63, 1, 1, 1), (2, 64, 0, 1, 1), (-1, 64, 1, 1, 1), (99, 64, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"kernels|trial"):
            _native.try_kernels(*arguments, is_packed=True)


@pytest.mark.parametrize("model", ["tiny_target", "smollm2"])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_rows_are_the_same_bits_in_every_batch(model, n_threads, request):
    llm = FlyLlama(
        request.getfixturevalue(model), kernels="auto", n_ctx=256, n_threads=n_threads, n_threads_batch=n_threads,
        flash_attn=True, verbose=False,
    )  # fmt: skip
    tokens = llm.tokenize(PROMPT.encode())[:24]
    alone = rows_of(llm, tokens, [1] * len(tokens))
    for size in (2, 3, 4, 6, 8, 12, 24):
        assert np.array_equal(alone, rows_of(llm, tokens, [size] * (len(tokens) // size))), size
    llm.close()


@pytest.mark.parametrize("model", ["tiny_target", "smollm2"])
def test_exact_texts_are_those_of_plain_decoding(model, request, tiny_draft):
    path = request.getfixturevalue(model)
    options = {"kernels": "auto", "n_ctx": 512, "flash_attn": True, "verbose": False}
    prompts = [PROMPT, "One two three one two three one two", "def add(a, b):\n    return"]
    with closing(FlyLlama(path, **options)) as llm:
        plain = [llm.create_completion(p, max_tokens=48, temperature=0.0)["choices"][0]["text"] for p in prompts]
    drafters = [PromptLookup(), *([DraftModel(tiny_draft)] if model == "tiny_target" else [])]
    for drafter in drafters:
        for draft_max in (1, 3, 8):
            with closing(FlyLlama(path, drafter=drafter, draft_max=draft_max, **options)) as llm:
                drafted = [
                    llm.create_completion(p, max_tokens=48, temperature=0.0)["choices"][0]["text"] for p in prompts
                ]
                assert drafted == plain, (drafter, draft_max)
                assert llm.stats.drafted > 0


def test_what_works_with_stock_kernels_works_with_ours(tiny_target, lora):
    with closing(FlyLlama(tiny_target, kernels="auto", n_ctx=256, verbose=False)) as llm:
        first = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"]
        state = llm.save_state()
        llm.reset()
        llm.load_state(state)
        assert llm.create_completion(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"] == first
    adapted = []
    for choice in ("auto", "stock"):
        with closing(FlyLlama(tiny_target, kernels=choice, lora_path=lora, n_ctx=256, verbose=False)) as llm:
            tokens = llm.tokenize(PROMPT.encode())
            adapted.append(rows_of(llm, tokens[:8], [8]))
    with closing(FlyLlama(tiny_target, n_ctx=256, verbose=False)) as llm:
        plain = rows_of(llm, tokens[:8], [8])
    noise, change = (np.abs(adapted[0] - rows).max() for rows in (adapted[1], plain))
    assert noise < 0.1 * change


def test_models_with_different_kernels_in_one_program(tiny_target):
    """Each decodes as it would alone; plain models have ours while they are installed."""
    options = {"n_ctx": 128, "flash_attn": True, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    of = {choice: FlyLlama(tiny_target, kernels=choice, **options) for choice in kernels.CHOICES}
    plain = llama_cpp.Llama(tiny_target, **options)  # tests/conftest.py has installed what is faster on this machine
    _native.take_kernels_everywhere(0)
    of["plain"] = llama_cpp.Llama(tiny_target, **options)
    kernels.install()
    of["installed"] = llama_cpp.Llama(tiny_target, **options)
    tokens = plain.tokenize(PROMPT.encode())[:8]
    rows = {name: rows_of(llm, tokens, [1] * 8) for name, llm in of.items()}
    assert np.array_equal(rows["plain"], rows["stock"])
    assert np.array_equal(rows["installed"], rows["auto"])
    assert not np.array_equal(rows["auto"], rows["stock"])
    for llm in (plain, *of.values()):
        llm.close()


def test_a_choice_that_there_is_not_is_refused(tiny_target, monkeypatch):
    with pytest.raises(ValueError, match="kernels"):
        FlyLlama(tiny_target, kernels="fast")
    monkeypatch.setenv(kernels.VARIABLE, "fast")
    with pytest.raises(ValueError, match=kernels.VARIABLE):
        FlyLlama(tiny_target)


def test_nothing_is_tried_where_other_extra_buffers_crash(monkeypatch):
    """A trial of llama.cpp's own products would use those that end the process."""

    def refuse(*_, **__):
        raise AssertionError("a trial")

    monkeypatch.undo()  # the verdict that every test here has
    monkeypatch.setattr(extra_buffers, "verdict", lambda: extra_buffers.Verdict(False, "AMX crashes"))
    monkeypatch.setattr(kernels, "_read", dict)
    monkeypatch.setattr(_native, "try_kernels", refuse)
    monkeypatch.setenv(kernels.VARIABLE, "auto")
    kernels.verdict.cache_clear()
    try:
        assert kernels.install() == kernels.Verdict((), "AMX crashes")
        assert kernels.types_for(None) == 0
        assert "AMX crashes" in kernels.describe()
    finally:
        kernels.verdict.cache_clear()
