"""Speculative sampling on models: the first tokens of an answer have the distribution that llama.cpp's own sampler
chain gives them on the target alone. Prints its p-values (-s)."""

from __future__ import annotations

import ctypes
import os

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaGrammar
from sampling_oracle import Fit

from pyfly_cpp import MTP, DraftModel, Exact, FlyBatch, FlyLlama, Fuzzy, PromptLookup, Stochastic, Window

OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = "Tom has 3 apples and 4 pears. Tom has 3 apples and"
N = 80
"""Answers of each test of the default run; PYFLY_FUZZ_CASES says how many of the others."""


def probabilities(base, tokens, settings, sampled):
    """What the chain draws from behind `tokens`, of which the last were `sampled` in this answer: {token: p}."""
    base.reset()
    base.eval([*tokens, *sampled])
    row = np.ctypeslib.as_array(llama_cpp.llama_get_logits(base._ctx.ctx), (base.n_vocab(),))
    chain = base._init_sampler(**settings)
    for token in sampled:
        llama_cpp.llama_sampler_accept(chain.sampler, token)
    data = (llama_cpp.llama_token_data * len(row))(*((i, float(logit), 0.0) for i, logit in enumerate(row)))
    candidates = llama_cpp.llama_token_data_array(data, len(row), -1, False)
    llama_cpp.llama_sampler_apply(chain.sampler, ctypes.byref(candidates))
    return {d.id: d.p for d in candidates.data[: candidates.size] if d.p > 0}


def fit(fly, path, settings, n_tokens=2, prompt=PROMPT, n=N):
    """How the first tokens of n answers fit."""
    base = llama_cpp.Llama(path, **OPTIONS)
    tokens = base.tokenize(prompt.encode())
    expected = {(): 1.0}
    for _ in range(n_tokens):
        expected = {
            (*sampled, token): mass * p
            for sampled, mass in expected.items()
            for token, p in probabilities(base, tokens, settings, sampled).items()
        }
    observed = []
    for seed in range(n):
        fly.set_seed(seed)
        generator = fly.generate(tokens, **settings)
        observed.append(tuple(next(generator) for _ in range(n_tokens)))
        generator.close()
    assert fly.stats.drafted >= n
    return Fit(observed, expected)


SETTINGS = {
    "top-k": {"temp": 0.8, "top_k": 3, "top_p": 1.0, "min_p": 0.0},
    "top-p and penalties": {"temp": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.3},
    "grammar": {"temp": 1.5, "top_k": 5, "top_p": 1.0, "min_p": 0.0},
}


def check(gate, how, drafter, target, draft, n_tokens=2, n=N):
    settings = dict(SETTINGS[how])
    if how == "grammar":
        settings["grammar"] = LlamaGrammar.from_string('root ::= " " [a-z] [a-z ]*', verbose=False)
    model, lookup = DraftModel(draft), PromptLookup(num_pred_tokens=4)
    drafters = {"draft": model, "lookup": lookup, "both": [lookup, model]}[drafter]
    fly = FlyLlama(target, drafter=drafters, gate=gate, draft_max=3, **OPTIONS)
    found = fit(fly, target, settings, n_tokens, n=n)
    print(f"{gate}, {how}, {drafter}: {found}; {fly.stats.summary()}")
    found.require()
    assert fly.stats.loose_accepted == 0 and fly.stats.matched > 0


@pytest.mark.parametrize(
    ("gate", "how", "drafter"),
    [
        ("stochastic", "grammar", "both"),
        ("stochastic", "top-k", "draft"),
        ("stochastic", "top-p and penalties", "draft"),
        ("rfsd-js:0", "top-k", "draft"),
    ],
)
def test_the_tiny_model(gate, how, drafter, tiny_target, tiny_draft):
    check(gate, how, drafter, tiny_target, tiny_draft)


@pytest.mark.fuzz
@pytest.mark.parametrize("drafter", ["draft", "both", "lookup"])
@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("gate", ["stochastic", "rfsd-js:0"])
def test_many_answers_of_the_tiny_model(gate, how, drafter, tiny_target, tiny_draft):
    n = int(os.environ.get("PYFLY_FUZZ_CASES", 0))
    if n == 0 or (gate.startswith("rfsd") and drafter == "lookup"):
        pytest.skip("PYFLY_FUZZ_CASES does not say how many answers, or the gate needs rows")
    check(gate, how, drafter, tiny_target, tiny_draft, 3, n)


def test_a_head_of_a_recurrent_model(tiny_qwen35):
    fly = FlyLlama(tiny_qwen35, drafter=MTP(), gate=Stochastic(), draft_max=3, **OPTIONS)
    found = fit(fly, tiny_qwen35, SETTINGS["top-k"])
    print(f"MTP: {found}; {fly.stats.summary()}")
    found.require()


def test_the_same_seed_gives_the_same_text_alone_and_among_others(tiny_target_f32, tiny_draft):
    options = {**OPTIONS, "type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    options = {**options, "drafter": DraftModel(tiny_draft, draft_max=4), "adaptive": False}
    request = {"max_tokens": 20, "temperature": 0.9}
    fly = FlyLlama(tiny_target_f32, **options)
    with FlyBatch(tiny_target_f32, n_parallel=3, **options) as batch:
        for gate in (Stochastic(), Fuzzy("js", 0.1, residual=True)):
            fly.gate = gate
            alone = [fly(PROMPT, seed=seed, **request)["choices"][0]["text"] for seed in range(3)]
            assert len(set(alone)) == 3
            assert fly(PROMPT, seed=1, **request)["choices"][0]["text"] == alone[1]
            handles = [batch.submit(PROMPT, gate=gate, seed=seed, **request) for seed in range(3)]
            assert [handle.result()["choices"][0]["text"] for handle in handles] == alone


def test_at_temperature_zero_it_is_the_text_of_exact(tiny_target, tiny_draft):
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft), draft_max=4, trace=True, **OPTIONS)
    expected = fly(PROMPT, max_tokens=40, temperature=0)["choices"]
    records = fly.records
    for gate in (Stochastic(), Fuzzy("js", 0.0, residual=True)):
        fly.gate = gate
        assert fly(PROMPT, max_tokens=40, temperature=0)["choices"] == expected
        assert [(r.token, r.origin, r.round) for r in fly.records] == [(r.token, r.origin, r.round) for r in records]


def test_what_cannot_be_is_refused_and_the_object_goes_on(tiny_target, tiny_draft):
    no_use = "the gate stochastic decides immediately and has no use for the window agree:3; leave it at None"
    with pytest.raises(ValueError, match=no_use):
        FlyLlama(tiny_target, gate=Stochastic(), window=Window(3), **OPTIONS)
    fly = FlyLlama(tiny_target, drafter=PromptLookup(), gate=Stochastic(), **OPTIONS)
    with pytest.raises(ValueError, match="leave mirostat_mode at 0"):
        fly(PROMPT, max_tokens=4, mirostat_mode=2)
    with pytest.raises(ValueError, match=no_use):
        fly.window = Window(3)
    fly.gate, fly.window = Exact(), Window(3)
    with pytest.raises(ValueError, match=no_use):
        fly.gate = Stochastic()
    assert fly.decoding.but(gate="stochastic").window is None, "what a request does not say is no contradiction"
    fly.window = None
    fly.gate = Fuzzy(residual=True)
    with pytest.raises(ValueError, match="draws its tokens from none"):
        fly(PROMPT, max_tokens=4, temperature=1.0)
    fly.gate = Stochastic()
    assert fly(PROMPT, max_tokens=4, temperature=1.0)["usage"]["completion_tokens"] > 0


@pytest.mark.alike
def test_a_seed_gives_the_text_without_drafts_where_kernels_round_alike(tiny_target_f32, tiny_draft):
    """Without truncation, too. In F16 a draw on the border of two tokens often gives the other one."""
    f32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    plain = FlyLlama(tiny_target_f32, **f32, **OPTIONS)
    fly = FlyLlama(tiny_target_f32, drafter=DraftModel(tiny_draft, draft_max=4), adaptive=False, **f32, **OPTIONS)
    tokens = plain.tokenize(PROMPT.encode())
    for seed in range(8):
        texts = []
        for llm in (plain, fly):
            llm.set_seed(seed)
            generator = llm.generate(tokens, temp=1.5, top_k=0, top_p=1.0, min_p=0.0)
            texts.append([token for token, _ in zip(generator, range(40))])
            generator.close()
        assert texts[0] == texts[1]
    assert fly.stats.matched > 0
