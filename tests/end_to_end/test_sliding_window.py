"""A sliding-window cache that drops what it no longer needs (swa_full=False): what is taken back is either still there,
or evaluated anew."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from gguf_edit import as_architecture, edit_gguf
from heads import LLAMA, SETTINGS, TOLERANCE, Script, prompts, second_choice, single_rows, take, worst_gap

from pyfly_cpp import FlyLlama, Margin, PromptLookup, Window

N_SWA = 248
# The cache has room for the window and a batch of n_ubatch, in steps of 256 cells: 8 tokens to spare, or 264.
TIGHT, ROOMY = {"n_ubatch": 8}, {"n_ubatch": 264}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny llama as a model of which four layers in six see 248 tokens."""
    fields = as_architecture(LLAMA, "granite_swa")
    fields["granite_swa.attention.sliding_window"] = N_SWA
    fields["granite_swa.attention.sliding_window_pattern"] = [True, True, False] * 2
    fields["granite_swa.logit_scale"] = 1.0

    def without_sinks(arrays):
        for i in range(6):
            arrays[f"blk.{i}.attn_sinks.weight"] = np.full(4, -100, dtype=np.float32)

    return str(edit_gguf(LLAMA, tmp_path_factory.mktemp("swa") / "swa.gguf", fields, without_sinks))


@pytest.fixture(scope="module")
def reference(model):
    """Keeps every cell."""
    llm = llama_cpp.Llama(model, swa_full=True, **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def text(reference):
    """Tokens of a prompt that is longer than the cache."""
    return reference.tokenize("\n\n".join(prompts(8)).encode(), add_bos=False)[:400]


def test_the_window_is_what_llama_cpp_drops(model, reference, text):
    """The trap: the base class cuts the cache and goes on with what is missing."""
    base = llama_cpp.Llama(model, swa_full=False, **TIGHT, **SETTINGS)
    base.eval(text)
    assert llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(base.ctx), 0) > 100
    prompt = [*text[:300], 300, 301]
    found = base(prompt, max_tokens=1, temperature=0, logprobs=None)
    assert found["usage"]["completion_tokens"] == 1
    row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(base.ctx, -1), (base.n_vocab(),)).copy()
    right = single_rows(reference, prompt, [0])[0]
    assert np.abs(row - right).max() > 0.01
    base.close()


@pytest.mark.parametrize(("k", "room"), [(4, TIGHT), (12, ROOMY), (12, TIGHT)], ids=str)
def test_rejections_at_every_depth(model, reference, text, k, room):
    """A step is taken back without loss, unless its batch was larger than llama.cpp's own."""
    expected = take(FlyLlama(model, swa_full=False, **room, **SETTINGS).generate(text, temp=0.0), 80)
    assert worst_gap(reference, text, expected) < TOLERANCE[LLAMA]
    llm = FlyLlama(model, swa_full=False, drafter=Script(k, text + expected), draft_max=k, **room, **SETTINGS)
    out = take(llm.generate(text, temp=0.0), 60)
    assert worst_gap(reference, text, out) < TOLERANCE[LLAMA]
    assert llm.stats.matched > 20
    assert (llm.stats.replayed > 0) == (k == 12 and room is TIGHT)
    llm.close()


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=str)
def test_another_prompt_of_the_same_beginning(model, reference, text, drafter):
    llm = FlyLlama(model, swa_full=False, drafter=drafter, adaptive=False, **TIGHT, **SETTINGS)
    for prompt in (text, [*text[:300], 300, 301], [*text[:299], 5, 6], text):
        assert worst_gap(reference, prompt, take(llm.generate(prompt, temp=0.0), 20)) < TOLERANCE[LLAMA]
    # The end of what was just generated is still there.
    longer = [*text, *take(llm.generate(text, temp=0.0), 20), 300]
    llm.reset_stats()
    assert worst_gap(reference, longer, take(llm.generate(longer, temp=0.0), 10)) < TOLERANCE[LLAMA]
    assert llm.stats.prefilled <= 2
    llm.close()


@pytest.mark.parametrize("room", [TIGHT, pytest.param(ROOMY, marks=pytest.mark.slow)], ids=str)
def test_windows_across_steps(model, reference, text, room):
    """Now and then the target's second choice is drafted, and nothing right behind it: the end of the window rejects
    it. Where the cache is tight, no mismatch is left open for longer than what it needs is there."""

    llm = FlyLlama(
        model, swa_full=False, drafter=second_choice(reference, 9), draft_max=3, gate=Margin(50.0),
        window=Window(12, rule="reconverge"), trace=True, **room, **SETTINGS,
    )  # fmt: skip
    out = take(llm.generate(text, temp=0.0), 50)
    for record, row in zip(llm.records, single_rows(reference, text, out)):
        assert row.max() - row[record.choice] < TOLERANCE[LLAMA]
    stats = llm.stats
    assert stats.rollbacks > 0
    assert stats.replayed == 0
    assert (stats.window_fallbacks > 0) == (room is TIGHT)
    llm.close()
