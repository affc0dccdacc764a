"""Packed weights in real models: the same bits in every batch, so exact decoding gives equal texts."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from described import N_VOCAB, POPULAR, make
from gguf_edit import edit_gguf

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama, PromptLookup, _native
from pyfly_cpp.errors import NotFiniteError
from pyfly_cpp.machine import extra_buffers, kernel_findings, kernels, memory
from pyfly_cpp.machine.conditions import resident_mib

pytestmark = pytest.mark.skipif(kernels._WHY_NOT is not None, reason=f"no kernels: {kernels._WHY_NOT}")

WIDE = {"embedding_length": 256, "feed_forward_length": 512, "attention.head_count_kv": 4}
ALIBI = {"attention.max_alibi_bias": 8.0}
WINDOW = {"attention.sliding_window": 100}
ALL = kernels.KernelVerdict(tuple(_native.kernel_types()), True, "every type")
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


@pytest.fixture(autouse=True)
def every_type(monkeypatch):
    """Whatever is faster on this machine: all types are packed if a model asks for kernels."""
    monkeypatch.setattr(kernels, "verdict", lambda: ALL)
    yield
    monkeypatch.undo()
    kernels.install()  # as tests/conftest.py does


def rows_of(llm, tokens, sizes, start=0):
    """Logits that follow each token, evaluated in batches of these sizes behind the `start` tokens that are evaluated
    already; [tokens][vocabulary]."""
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm._ctx.ctx), 0, start, -1)
    batch = llama_cpp.llama_batch_init(64, 0, 1)
    out, position = [], start
    for size in sizes:
        batch.n_tokens = size
        for i in range(size):
            batch.token[i], batch.pos[i], batch.logits[i] = tokens[position - start + i], position + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert llama_cpp.llama_decode(llm._ctx.ctx, batch) == 0
        shape = (size, llm.n_vocab())
        out.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm._ctx.ctx), shape=shape).copy())
        position += size
    llama_cpp.llama_batch_free(batch)
    return np.concatenate(out) if out else None


@pytest.mark.parametrize("kind", ALL.types, ids=str)
@pytest.mark.parametrize("n_rows", [1, 3, 8, 17, 64])
def test_products_are_as_right_as_those_of_llama_cpp(kind, n_rows):
    ours = _native.try_kernels(kind, 128, n_rows, 2, 1, is_ours=True)
    stock = _native.try_kernels(kind, 128, n_rows, 2, 1, is_ours=False)
    assert ours.error <= max(1.2 * stock.error, 1e-6) and ours.us > 0


@pytest.mark.parametrize("n_cells", [64, 100, 700])
@pytest.mark.parametrize("n_rows", [1, 3, 17, 64])
def test_attention_is_more_right_than_that_of_llama_cpp(n_cells, n_rows):
    for n_threads in (1, 2, 3):
        ours = _native.try_attention(n_cells, n_rows, n_threads, 1, is_ours=True)
        assert ours.error < 2e-6 and ours.us > 0
    if n_rows < 64:  # whose tiles add in F32, too
        assert ours.error < _native.try_attention(n_cells, n_rows, 2, 1, is_ours=False).error


@pytest.mark.parametrize("kind", ALL.types, ids=str)
def test_products_have_the_bits_of_one_row_in_every_batch(kind):
    for n_threads in (1, 2):
        assert _native.batches_with_other_bits(kind, 128, n_threads, is_ours=True) == ()


def test_products_that_round_by_the_batch_are_found():
    """llama.cpp's: one row of F32 is a sum in another order than that of a tile of several."""
    assert set(_native.batches_with_other_bits(llama_cpp.GGML_TYPE_F32, 128, 1, is_ours=False)) & {16, 32}


def test_a_trial_of_what_is_not_there_is_refused():
    for arguments in ((4, 64, 1), (2, 63, 1), (2, 64, 0), (99, 64, 1)):
        with pytest.raises(ValueError, match=r"kernels|trial"):
            _native.batches_with_other_bits(*arguments, is_ours=True)
    for arguments in ((4, 64, 1, 1, 1), (2, 63, 1, 1, 1), (2, 64, 0, 1, 1), (-1, 64, 1, 1, 1), (99, 64, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"kernels|trial"):
            _native.try_kernels(*arguments, is_ours=True)
    for arguments in ((8, 9, 1, 1), (8, 0, 1, 1), (8, 1, 0, 1), (8, 1, 1, 0)):
        with pytest.raises(ValueError, match="trial"):
            _native.try_attention(*arguments, is_ours=True)


@pytest.mark.parametrize("model", ["tiny_target", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_rows_are_the_same_bits_in_every_batch(model, request):
    """And with every number of threads, behind 512 cells, where llama.cpp splits one token's attention by threads, and
    in batches of 64 and more, which it computes in tiles."""
    path = request.getfixturevalue(model)
    options = {"kernels": "auto", "n_ctx": 640, "n_batch": 64, "verbose": False}
    alone = {}
    for n_threads in (1, 2, 3):
        with closing(FlyLlama(path, n_threads=n_threads, n_threads_batch=n_threads, **options)) as llm:
            tokens = (llm.tokenize(PROMPT.encode()) * 40)[:600]
            for start in (0, 552):
                rows_of(llm, tokens[:start], [64] * (start // 64) + [start % 64] * (start > 0))
                for size in (1, 2, 3, 4, 6, 8, 12, 24, 48):
                    rows = rows_of(llm, tokens[start : start + 48], [size] * (48 // size), start)
                    assert np.array_equal(alone.setdefault(start, rows), rows), (n_threads, start, size)
            assert np.array_equal(alone[0], rows_of(llm, tokens[:64], [64])[:48])


CACHES = {"BF16": (30, 30), "Q8_0": (8, 8), "Q4_0": (2, 2), "Q8_0 and F16": (8, 1)}


@pytest.fixture(params=[*CACHES, "distances", "a window"])
def other_attention(request, tiny_target, tmp_path):
    """A model, and options with which its attention is not the plain one."""
    if request.param in CACHES:
        return tiny_target, dict(zip(("type_k", "type_v"), CACHES[request.param]))
    architecture, more = ("mpt", ALIBI) if request.param == "distances" else ("gemma3", {**WINDOW, "block_count": 6})
    path = make(architecture, {**WIDE, "context_length": 1024, **more}, tmp_path / "f32.gguf")
    return str(quantised(path, "Q8_0")), {}


def test_rows_are_the_same_bits_whatever_is_attended_to(other_attention):
    """Alone and in batches of 2 to 32, with one to four threads, and behind a state that another object has saved."""
    path, more = other_attention
    options = {"kernels": "auto", "n_ctx": 512, "n_batch": 64, "verbose": False, **more}
    tokens = [int(token) for token in np.random.default_rng(1).integers(3, 120, 332)]
    alone = state = None
    for n_threads in (1, 2, 3, 4):
        with closing(FlyLlama(path, n_threads=n_threads, n_threads_batch=n_threads, **options)) as llm:
            if n_threads % 2:
                llm.eval(tokens[:300])
                state = llm.save_state()
            else:
                llm.load_state(state)
            for sizes in ([1] * 32 if n_threads == 1 else [1] * 3, [2, 3, 8], [32]):
                rows = rows_of(llm, tokens[300:], sizes, 300)
                alone = rows if alone is None else alone
                assert np.array_equal(alone[: len(rows)], rows), (n_threads, sizes)
            assert llm.inexact == ()


@pytest.mark.parametrize("architecture", POPULAR)
def test_exact_tokens_of_every_kind_of_model(architecture, tmp_path):
    """Sliding windows, recurrent states, latent attention, experts, sinks: the tokens of plain decoding, behind any
    number of rejections."""
    path = make(architecture, POPULAR[architecture], tmp_path / "model.gguf")
    random = np.random.default_rng(3)
    prompt = random.integers(0, N_VOCAB, 20).tolist() * 2

    def tokens_of(drafter):
        drafting = {} if drafter is None else {"drafter": drafter, "draft_max": 5}
        with closing(FlyLlama(path, kernels="auto", n_ctx=256, verbose=False, **drafting)) as llm:
            return list(itertools.islice(llm.generate(prompt, temp=0.0), 150))

    plain = tokens_of(None)
    for drafter in (PromptLookup(), lambda _: random.integers(0, N_VOCAB, 5).tolist()):
        assert tokens_of(drafter) == plain, drafter


def test_what_is_not_finite_stays_in_its_request(tiny_qwen35, tmp_path):
    """A token without numbers, in a prompt or in a draft: the recurrent state that it leaves is nobody else's."""
    poison = 700

    def poisoned(arrays):
        arrays["token_embd.weight"] = arrays["token_embd.weight"].copy()
        arrays["token_embd.weight"][poison] = np.nan

    path = str(edit_gguf(tiny_qwen35, tmp_path / "poisoned.gguf", tensors=poisoned))
    prompts = [[300 + 7 * i, *range(310, 310 + 9 * i)] for i in range(4)]
    options = {"kernels": "auto", "n_ctx": 256, "verbose": False}
    sampling = {"max_tokens": 8, "temperature": 0.0}
    with closing(FlyLlama(path, **options)) as llm:
        plain = texts(llm, prompts, 8)
        with pytest.raises(NotFiniteError):
            llm([5, poison, 6], **sampling)
        assert texts(llm, prompts, 8) == plain
    with FlyBatch(path, 2, drafter=lambda _: [poison] * 3, draft_max=3, adaptive=False, **options) as batch:
        handles = []
        for prompt in prompts * 2:
            handles.append(batch.submit(prompt, **sampling))
            with pytest.raises(NotFiniteError):
                batch.submit([*prompt, poison, 5], **sampling).result()
        assert [handle.result()["choices"][0]["text"] for handle in handles] == plain * 2


def quantised(path, kind):
    """This model in another type."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    out = path.with_name(f"{kind}.gguf")
    assert llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), params) == 0
    return out


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_experts(kind, tmp_path):
    """A mixture of four experts, two for each token: close to llama.cpp's, and the same bits in every batch."""
    path = quantised(make("qwen3moe", POPULAR["qwen3moe"], tmp_path / "f32.gguf"), kind)
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, 48).tolist()
    rows = {}
    for choice in kernels.CHOICES:
        with closing(FlyLlama(str(path), kernels=choice, flash_attn=True, n_ctx=64, verbose=False)) as llm:
            rows[choice] = rows_of(llm, tokens, [1] * 48)
            for size in (2, 3, 8, 24, 48):
                other = rows_of(llm, tokens, [size] * (48 // size))
                assert choice == "stock" or np.array_equal(rows[choice], other), size
    difference = np.abs(rows["auto"] - rows["stock"]).max()
    assert 0 < difference < (0.01 if kind == "F16" else 0.3) * np.abs(rows["stock"]).max()


@pytest.mark.parametrize(
    ("architecture", "more", "kind", "is_on"),
    [
        ("phi3", {"rope.dimension_count": 16, "rope.scaling.original_context_length": 256}, "Q8_0", True),
        ("qwen3", {}, "Q8_0", True),
        ("qwen3", {}, "TQ1_0", False),  # which nobody packs
        ("qwen3", {"embedding_length": 2048, "attention.head_count": 32, "attention.head_count_kv": 32}, None, False),
        ("mpt", {}, "Q8_0", True),
        ("mpt", ALIBI, "Q8_0", True),
        ("bloom", {}, "Q8_0", True),
    ],
)
def test_flash_attention_is_on_if_ours_computes_it(architecture, more, kind, is_on, tmp_path):
    """llama.cpp's rounds by the number of threads from 512 tokens on."""
    path = make(architecture, {**WIDE, "block_count": 1, **more}, tmp_path / "f32.gguf")
    path = path if kind is None else quantised(path, kind)
    assert kernels.verdict().attends(_native.inspect_model(str(path))) == is_on
    with closing(FlyLlama(str(path), kernels="auto", n_ctx=64, verbose=False)) as llm:
        assert bool(llm.context_params.flash_attn_type) == is_on
    with closing(FlyLlama(str(path), kernels="auto", flash_attn=True, n_ctx=64, verbose=False)) as llm:
        assert llm.context_params.flash_attn_type  # who asks for it gets it


def test_no_flash_attention_for_types_that_are_left_to_llama_cpp(tiny_target, monkeypatch):
    others = kernels.KernelVerdict(
        tuple(kind for kind in ALL.types if kind != llama_cpp.GGML_TYPE_F16), True, "not F16"
    )
    monkeypatch.setattr(kernels, "verdict", lambda: others)
    with closing(FlyLlama(tiny_target, kernels="auto", n_ctx=64, verbose=False)) as llm:
        assert not llm.context_params.flash_attn_type


def test_threads_change_no_row_of_what_is_not_ours(tmp_path):
    path = quantised(make("qwen3", {**WIDE, "context_length": 1024}, tmp_path / "f32.gguf"), "TQ1_0")
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, 604).tolist()
    rows = []
    for n_threads in (1, 2, 3):
        options = {"n_threads": n_threads, "n_threads_batch": n_threads, "n_ctx": 640, "n_batch": 64, "verbose": False}
        with closing(FlyLlama(str(path), kernels="auto", **options)) as llm:
            rows.append(rows_of(llm, tokens, [60] * 10 + [1] * 4)[600:])
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


def test_a_model_knows_whether_a_batch_changes_its_rows(tiny_target, lora, tmp_path):
    """What is said is what holds: one token alone, and the first of a batch of four."""
    alibi = str(make("mpt", ALIBI, tmp_path / "alibi.gguf"))
    latent = str(make("deepseek2", POPULAR["deepseek2"], tmp_path / "latent.gguf"))  # matrices in three dimensions
    cases = (
        (tiny_target, {}, ()),
        (latent, {}, ()),
        (tiny_target, {"kernels": "stock", "flash_attn": True}, ("attention", "attn_q", "(F16)")),
        (tiny_target, {"flash_attn": False}, ("without flash attention",)),
        (tiny_target, {"type_k": 8, "type_v": 2}, ()),
        (tiny_target, {"type_k": 7, "type_v": 7, "flash_attn": True}, ("Q5_1",)),
        (tiny_target, {"lora_path": lora}, ("LoRA",)),
        (alibi, {}, ()),
    )
    for path, options, named in cases:
        with closing(FlyLlama(path, n_ctx=256, verbose=False, **{"kernels": "auto", **options})) as llm:
            tokens = [int(token) for token in np.random.default_rng(1).integers(3, 100, 100)]
            rows_of(llm, tokens[:90], [30] * 3)
            alone = rows_of(llm, tokens[90:94], [1] * 4, 90)
            said = llm.inexact
            rows_of(llm, tokens[:90], [30] * 3)
            together = rows_of(llm, tokens[90:94], [4], 90)
            assert said == llm.inexact
            assert bool(said) == bool(named) and all(name in "; ".join(said) for name in named), options
            assert said or np.array_equal(alone, together), options


def texts(llm, prompts, n=48):
    return [llm.create_completion(p, max_tokens=n, temperature=0.0)["choices"][0]["text"] for p in prompts]


PROMPTS = [PROMPT, "One two three one two three one two", "def add(a, b):\n    return", PROMPT + " How many"]


@pytest.mark.parametrize("model", ["tiny_target", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_exact_texts_are_those_of_plain_decoding(model, request, tiny_draft):
    """Whatever is drafted, how much of it, with which threads, alone or behind what another prompt has left."""
    path = request.getfixturevalue(model)
    options = {"kernels": "auto", "n_ctx": 512, "verbose": False}
    with closing(FlyLlama(path, n_threads=2, n_threads_batch=1, **options)) as llm:
        plain = texts(llm, PROMPTS)
        assert texts(llm, PROMPTS[::-1]) == plain[::-1]
    drafters = [None, PromptLookup(), [PromptLookup(), lambda history: list(history[-5:])]]
    drafters += [DraftModel(tiny_draft)] if model == "tiny_target" else [DraftModel(path)]
    for drafter in drafters:
        for draft_max in (1, 3, 8) if model == "tiny_target" else (5,):
            llm = FlyLlama(path, drafter=drafter, draft_max=draft_max, n_threads=1, n_threads_batch=2, **options)
            with closing(llm):
                assert texts(llm, PROMPTS) == plain, (drafter, draft_max)
                assert drafter is None or llm.stats.drafted > 0
                llm.reset()
                assert texts(llm, PROMPTS[:1]) == plain[:1]


@pytest.mark.parametrize("model", ["tiny_target", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_texts_at_once_are_those_of_one_alone(model, request, tiny_draft):
    """Requests come and go, so their cells lie scattered, and those that one leaves are taken by another."""
    path = request.getfixturevalue(model)
    options = {"kernels": "auto", "n_ctx": 256, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    prompts = [prompt[: 10 + 9 * i] for i, prompt in enumerate((PROMPTS * 3)[:9])]
    limits = [{"max_tokens": n, "temperature": 0.0} for n in (5, 40, 17, 33, 9, 48, 25, 12, 40)]
    with closing(FlyLlama(path, **options)) as llm:
        plain = [llm(p, **limit)["choices"][0]["text"] for p, limit in zip(prompts, limits)]
    drafters = [None, PromptLookup()] + ([DraftModel(tiny_draft)] if model == "tiny_target" else [])
    for n, drafter in itertools.product((2, 4, 8) if model == "tiny_target" else (3,), drafters):
        with FlyBatch(path, n, drafter=drafter, **options) as batch:
            handles = [batch.submit(p, **limit) for p, limit in zip(prompts, limits)]
            assert [handle.result()["choices"][0]["text"] for handle in handles] == plain, (n, drafter)


def test_eight_requests_that_come_and_go_in_a_quantised_cache(tiny_target):
    """More than fit at once: cells of those that have left serve others, and beginnings are shared."""
    options = {"kernels": "auto", "n_ctx": 256, "type_k": 8, "type_v": 8, "verbose": False}
    stem = [300 + i % 90 for i in range(120)]
    prompts = [[*stem[: 20 * (i % 7)], *range(400 + i, 400 + i + 5 * (i % 5 + 1))] for i in range(20)]
    limits = [{"max_tokens": 3 + 11 * i % 41, "temperature": 0.0} for i in range(20)]
    with closing(FlyLlama(tiny_target, n_threads=3, n_threads_batch=1, **options)) as llm:
        plain = [llm(p, **limit)["choices"][0]["text"] for p, limit in zip(prompts, limits)]
    with FlyBatch(tiny_target, 8, n_cells=512, drafter=PromptLookup(), adaptive=False, **options) as batch:
        handles = [batch.submit(p, **limit) for p, limit in zip(prompts, limits)]
        for i in (4, 9, 15):
            handles[i].cancel()
        found = {i: handle.result()["choices"][0]["text"] for i, handle in enumerate(handles) if i not in (4, 9, 15)}
    assert found == {i: plain[i] for i in found}


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}], ids=["default", "all"]
)
def test_a_seed_gives_the_same_text_whatever_is_drafted(sampling, tiny_target, tiny_draft):
    def sampled(drafter):
        drafting = {} if drafter is None else {"drafter": drafter, "draft_max": 4}
        with closing(FlyLlama(tiny_target, kernels="auto", n_ctx=512, verbose=False, **drafting)) as llm:
            answers = [llm.create_completion(PROMPT, max_tokens=48, seed=seed, **sampling) for seed in range(8)]
            return [answer["choices"][0]["text"] for answer in answers]

    plain = sampled(None)
    assert len(set(plain)) > 1
    assert sampled(PromptLookup()) == plain
    assert sampled(DraftModel(tiny_draft)) == plain


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


def test_whose_attention_it_is_is_settled_when_a_model_is_loaded(tiny_target):
    """Trials and other models change nothing of a model that computes: it would crash or hang."""
    options = {"kernels": "auto", "n_ctx": 512, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    with closing(FlyLlama(tiny_target, **options)) as llm:
        tokens = (llm.tokenize(PROMPT.encode()) * 40)[:400]
        rows = rows_of(llm, tokens[:48], [48])
        done = threading.Event()

        def disturb():
            while not done.is_set():
                for is_ours in (False, True):
                    _native.try_attention(8, 1, 1, 1, is_ours=is_ours)
                for what in (0, ALL.bits):
                    _native.take_kernels_everywhere(what)

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            for _ in range(20):
                assert np.array_equal(rows_of(llm, tokens, [48] * 8)[:48], rows)
        finally:
            done.set()
            thread.join()


def test_a_restored_state_does_not_depend_on_what_was_in_the_cache(tiny_target):
    """Its cells are added up as they were saved, in a fresh process as well as where they have been written before, in
    another order."""
    options = {"kernels": "auto", "n_ctx": 128, "n_threads": 1, "verbose": False}
    with closing(FlyLlama(tiny_target, **options)) as llm:
        tokens = (llm.tokenize(PROMPT.encode()) * 10)[:100]
        llm.eval(tokens[:60])
        state = llm.save_state()
    with closing(FlyLlama(tiny_target, **options)) as llm:
        llm.load_state(state)
        fresh = rows_of(llm, tokens[60:68], [8], 60)
        for first, last in ((0, 30), (40, 50)):  # cells that the next tokens take
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm._ctx.ctx), True)
            rows_of(llm, tokens[:60], [60])
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm._ctx.ctx), 0, first, last)
            rows_of(llm, tokens[60:80], [20], 60)
            llm.load_state(state)
            assert np.array_equal(rows_of(llm, tokens[60:68], [8], 60), fresh)


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


@pytest.fixture
def known(monkeypatch):
    """Sets what is known of the kernels."""
    monkeypatch.undo()  # the verdict that every test here has

    def set_known(**found):
        kernels._verdict.cache_clear()
        monkeypatch.setattr(kernel_findings, "find", lambda: kernel_findings.Findings(**found))

    yield set_known
    monkeypatch.undo()
    kernels._verdict.cache_clear()


def test_nothing_is_tried_where_other_extra_buffers_crash(known, monkeypatch):
    """A trial of llama.cpp's own products would use those that end the process."""

    def refuse():
        raise AssertionError("a trial")

    known()
    monkeypatch.setattr(extra_buffers, "verdict", lambda: extra_buffers.BufferVerdict(False, "AMX crashes"))
    monkeypatch.setattr(kernel_findings, "find", refuse)
    assert kernels.install() == kernels.KernelVerdict((), False, "AMX crashes")
    assert kernels.take(None, "model.gguf", {}).bits == 0
    assert "AMX crashes" in kernels.describe()


@pytest.mark.parametrize("isa", ["none", "sse"])
def test_an_instruction_set_that_leaves_none_is_named(isa):
    code = "from pyfly_cpp.machine import kernels; print(kernels.verdict())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYFLY_ISA": isa}, check=True
    )
    least = "avx2" if platform.machine() == "x86_64" else "dotprod"
    assert "types=()" in done.stdout and f"PYFLY_ISA is {isa}" in done.stdout and least in done.stdout


@pytest.mark.parametrize("found", [{"right": (llama_cpp.GGML_TYPE_F32,)}, {"why_not": "a trial of ours crashed"}])
def test_what_fails_its_trial_is_left_to_llama_cpp(found, known, tiny_target):
    known(**found)
    assert kernels.verdict()[:2] == (found.get("right", ()), False)
    assert "crashed" not in str(found) or "crashed" in kernels.describe()
    options = {"n_ctx": 128, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    with closing(FlyLlama(tiny_target, **options)) as llm:
        assert not llm.context_params.flash_attn_type
        tokens = llm.tokenize(PROMPT.encode())[:8]
        rows = rows_of(llm, tokens, [8])
    with closing(FlyLlama(tiny_target, kernels="stock", **options)) as llm:
        assert np.array_equal(rows, rows_of(llm, tokens, [8]))


OTHER_LLAMA_CPP = """
// Stands before ggml's function of this name: operations of packed weights get parameters that have a field more.
#include <cstddef>
#include <cstring>
#include <dlfcn.h>
#include <vector>
struct Params { int thread, n_threads; size_t work_size; void * work; void * pool; bool use_ref; };
struct Longer { int thread, n_threads; void * one_more; size_t work_size; void * work; void * pool; bool use_ref; };
struct Traits {
    virtual ~Traits();
    virtual bool work_size(int, const void *, size_t &);
    virtual bool compute(void *, void *);
};
struct Extra { virtual ~Extra(); virtual bool supports(void *, const void *); virtual Traits * traits(const void *); };
struct Type { const char * (*name)(Type *); void * others[5]; void * device; Extra * context; };
extern "C" bool ggml_cpu_extra_compute_forward(Params * params, void * op) {
    using List = std::vector<Type *> & (*)();
    static void * const library = dlopen("libggml-cpu.so.0", RTLD_LAZY | RTLD_NOLOAD);
    static const List list = (List)dlsym(library, "_Z39ggml_backend_cpu_get_extra_buffer_typesv");
    for (Type * type : list()) {
        Traits * traits = type->context ? type->context->traits(op) : nullptr;
        const bool is_ours = std::strcmp(type->name(type), "PYFLY") == 0 && params->work_size < BELOW;
        const Params & p = *params;
        Longer longer = {p.thread, p.n_threads, nullptr, p.work_size, p.work, p.pool, false};
        if (traits && traits->compute(is_ours ? (void *)&longer : (void *)params, op)) {
            return true;
        }
    }
    return false;
}
"""

USE = """
import sys
from pyfly_cpp import FlyLlama, PromptLookup
from pyfly_cpp.machine import kernels
llm = FlyLlama(sys.argv[1], drafter=PromptLookup(), n_ctx=128, verbose=False)
print(llm.create_completion("One two three one two", max_tokens=16, temperature=0.0)["choices"][0]["text"])
print(kernels.describe())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("c++") is None,
    reason="needs x86-64 Linux and a C++ compiler",
)
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_llama_cpp_with_other_parameters_is_a_sentence(is_seen, tmp_path, tiny_target):
    """No process of the user's ends: neither where the layout is seen to be another one nor where the trial crashes."""
    (tmp_path / "other.cpp").write_text(OTHER_LLAMA_CPP)
    library = tmp_path / "other.so"
    # Bytes: the operation that only looks has more of them than those of the trial.
    below = 1_000_000_000 if is_seen else 100_000
    command = ["c++", "-shared", "-fPIC", "-O1", f"-DBELOW={below}", str(tmp_path / "other.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "XDG_CACHE_HOME": str(tmp_path)}
    said = "not known" if is_seen else "crashed (SIG"
    for is_first in (True, False):
        command = [sys.executable, "-c", USE, tiny_target]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout and "kernels.json" in done.stdout
        assert (said in done.stderr) == is_first
    command = [sys.executable, "-m", "pyfly_cpp", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said in " ".join(done.stdout.split()) and "RuntimeWarning" not in done.stderr


def test_a_model_that_memory_cannot_hold_twice_stays_in_its_file(tiny_target, tmp_path, monkeypatch):
    for part in (1, 2):
        (tmp_path / f"a[b]-0000{part}-of-00002.gguf").write_bytes(b"x" * 1000)
    assert memory.bytes_of_model(str(tmp_path / "a[b]-00001-of-00002.gguf")) == 2000
    n_bytes = memory.bytes_of_model(tiny_target)
    assert n_bytes == Path(tiny_target).stat().st_size
    n_both = n_bytes + memory.context_of(tiny_target, {}, 1)
    for n_free, smaller in ((n_bytes - 1, "file"), (n_both - 1, "context"), (n_both, None), (None, None)):
        monkeypatch.setattr(memory, "available", lambda n=n_free: n)
        with pytest.warns(RuntimeWarning, match=f"take a smaller {smaller}") if smaller else contextlib.nullcontext():
            assert bool(kernels.take("auto", tiny_target, {}).bits) == (smaller is None)
    assert not kernels.take("stock", tiny_target, {}).bits


def test_a_context_that_does_not_fit_beside_packed_weights(tiny_target, monkeypatch):
    """It takes the place of a copy of the weights, which the system can let go in their file."""
    options = {"n_ctx": 2048, "flash_attn": True, "verbose": False}
    for n_free, is_packed in ((20_000_000, False), (40_000_000, True)):  # the file has 11 MB, the context 15
        monkeypatch.setattr(memory, "available", lambda n=n_free: n)
        with contextlib.nullcontext() if is_packed else pytest.warns(RuntimeWarning, match="take a smaller context"):
            llm = FlyLlama(tiny_target, kernels="auto", **options)
        assert bool(llm._kernels.types) == is_packed
        llm.close()
    assert memory.context_of(tiny_target, {"n_ctx": -1, "type_k": "q8_0"}, 1) == memory.context_of(tiny_target, {}, 1)


def test_nobody_is_warned_of_what_a_gpu_holds(tiny_target, monkeypatch, recwarn):
    monkeypatch.setattr(memory, "available", lambda: 1)
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    assert not kernels.take("auto", tiny_target, {"n_gpu_layers": -1}).bits
    assert not recwarn.list


def test_unloading_gives_memory_back(tiny_target):
    if resident_mib() is None:
        pytest.skip("this system does not tell")
    sizes = []
    for _ in range(8):
        with closing(FlyLlama(tiny_target, kernels="auto", n_ctx=128, verbose=False)) as llm:
            llm.eval([5, 6, 7])
        sizes.append(resident_mib())
    assert sizes[-1] - sizes[2] < 11, "a model has eleven megabytes"


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_model_that_is_saved_is_the_one_that_was_loaded(kind, tmp_path):
    """llama.cpp reads weights back: packed ones, those of experts among them, are the bytes of the file. It writes keys
    that the file did not have, and the model is loaded with them."""
    saved = tmp_path / "saved.gguf"
    loaded = quantised(make("qwen3moe", POPULAR["qwen3moe"], tmp_path / "f32.gguf"), kind)
    rows = []
    for path in (loaded, saved):
        with closing(FlyLlama(str(path), kernels="auto", n_ctx=64, verbose=False)) as llm:
            rows.append(rows_of(llm, [1, 2, 3], [3]))
            if path == loaded:
                llama_cpp.llama_model_save_to_file(llm._model.model, str(saved).encode())
    tensors = [{t.name: t.data for t in gguf.GGUFReader(path).tensors} for path in (loaded, saved)]
    assert tensors[0].keys() == tensors[1].keys()
    assert [name for name, data in tensors[0].items() if not np.array_equal(data, tensors[1][name])] == []
    assert np.array_equal(*rows)


LOCKED = """
import sys
from pathlib import Path
from pyfly_cpp import FlyLlama, _native
from pyfly_cpp.machine import kernels

def locked():
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

_native.enable_kernels()
kernels.verdict = lambda: kernels.KernelVerdict(tuple(_native.kernel_types()), True, "every type")
llm = FlyLlama(sys.argv[1], kernels="auto", n_ctx=64, use_mlock=True, verbose=False)
print(locked())
llm.close()
print(locked())
"""


def run_locked(model, most=None):
    """Bytes that are locked with a model and after it, and warnings, in a process that may lock `most` bytes; None: as
    many as this one."""
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell")

    def limit():
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK: with it, no limit holds
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))

    done = subprocess.run(
        [sys.executable, "-c", LOCKED, model],
        preexec_fn=limit if most is not None else None,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in done.stdout.split()], done.stderr


def test_the_weights_that_are_read_are_locked(tiny_target):
    (during, after), said = run_locked(tiny_target)
    if "ulimit -l" in said:
        pytest.skip("this process may not lock as much")
    size = Path(tiny_target).stat().st_size
    assert 0.95 * size < during < 1.3 * size  # packed, and the rest that is read; not the file as well
    assert after < 0.1 * size


def test_weights_that_cannot_be_locked_are_told_of(tiny_target):
    (during, _), said = run_locked(tiny_target, 1 << 16)
    assert during < 1 << 17
    assert "ulimit -l" in said and "use_mlock" in said


HUGE_PAGES = """
import sys
from pathlib import Path
from pyfly_cpp import FlyLlama, _native
from pyfly_cpp.machine import kernels

def n_mappings():
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    return sum("hg" in line.split() for line in lines if line.startswith("VmFlags:"))

_native.enable_kernels()
kernels.verdict = lambda: kernels.KernelVerdict(tuple(_native.kernel_types()), True, "every type")
before = n_mappings()
llm = FlyLlama(sys.argv[1], kernels="auto", n_ctx=64, verbose=False)
sys.exit(n_mappings() <= before)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without huge pages")
def test_packed_weights_ask_for_huge_pages(tiny_target):
    assert subprocess.run([sys.executable, "-c", HUGE_PAGES, tiny_target]).returncode == 0
