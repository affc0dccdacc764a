"""The EAGLE-3 head: what it drafts, that nothing is lost, and what is refused."""

from __future__ import annotations

import itertools
import re

import llama_cpp
import numpy as np
import pytest
from gguf_edit import as_architecture, edit_gguf, other_token, without
from heads import (
    EAGLE3,
    HYBRID,
    LLAMA,
    SETTINGS,
    TOLERANCE,
    error_in_subprocess,
    generate,
    model_fixture,
    prompts,
    single_rows,
    worst_gap,
)

from pyfly_cpp import MTP, DraftModel, Eagle3, Entropy, Exact, FlyLlama, Fuzzy, Margin, PromptLookup, Window
from pyfly_cpp.errors import IncompatibleDraftError

TOOL_ACCEPTANCE = 0.520  # llama.cpp's draft-eagle3 on these prompts, 3 drafts a round


reference = model_fixture(lambda: llama_cpp.Llama(str(LLAMA), **SETTINGS))
llm = model_fixture(lambda: FlyLlama(LLAMA, drafter=Eagle3(EAGLE3), adaptive=False, **SETTINGS))


def test_acceptance_and_losslessness(reference, llm):
    llm.reset_stats()
    for prompt in prompts(30):
        tokens, out = generate(llm, prompt)
        assert worst_gap(reference, tokens, out) < TOLERANCE[LLAMA]
    stats = llm.stats
    assert stats.acceptance >= TOOL_ACCEPTANCE
    assert stats.mean_accepted > 2.45
    assert dict(stats.accepted_by_drafter) == {"EAGLE-3": stats.matched}


def test_only_tokens_of_the_reduced_vocabulary_are_drafted(llm):
    gguf = pytest.importorskip("gguf")
    d2t = next(t for t in gguf.GGUFReader(EAGLE3).tensors if t.name == "d2t").data
    llm.trace = True
    generate(llm, prompts(1)[0])
    drafted = {r.token for r in llm.records if r.depth} | {t for r in llm.records for t in r.rejected}
    llm.trace = False
    assert drafted <= set(d2t.tolist())
    assert len(drafted) > 10


def test_long_prompts_in_batches_and_conversations(reference):
    text = "\n\n".join(prompts(8))
    at_once = FlyLlama(LLAMA, drafter=Eagle3(EAGLE3), adaptive=False, **SETTINGS)
    tokens = at_once.tokenize(text.encode(), add_bos=False)[:500]
    expected = list(itertools.islice(at_once.generate(tokens, temp=0.0), 60))
    in_batches = FlyLlama(LLAMA, drafter=Eagle3(EAGLE3), n_batch=32, n_ubatch=16, adaptive=False, **SETTINGS)
    assert worst_gap(reference, tokens, list(itertools.islice(in_batches.generate(tokens, temp=0.0), 60))) < 1e-3
    assert abs(at_once.stats.acceptance - in_batches.stats.acceptance) < 0.1
    at_once.reset_stats()
    longer = tokens + expected + at_once.tokenize(prompts(9)[8].encode(), add_bos=False)
    out = list(itertools.islice(at_once.generate(longer, temp=0.0), 40))
    assert worst_gap(reference, longer, out) < TOLERANCE[LLAMA]
    assert at_once.stats.prefilled < len(longer) - len(tokens)
    assert at_once.stats.drafted > 0
    at_once.close()
    in_batches.close()


@pytest.mark.parametrize("gate", [Entropy(0.3), Margin(0.3)], ids=str)
def test_a_window_of_6_cannot_fit_in_a_round_of_3(llm, gate):
    expected = [generate(llm, prompt, 48) for prompt in prompts(3)]
    with pytest.warns(UserWarning, match="never accepts anything loosely, .* at most 3 drafts"):
        loose = FlyLlama(LLAMA, drafter=Eagle3(EAGLE3), gate=gate, window=Window(6), adaptive=False, **SETTINGS)
    assert [generate(loose, prompt, 48) for prompt in prompts(3)] == expected
    assert loose.stats.loose_accepted == loose.stats.rejected_window == 0
    assert loose.stats.rejected_boundary > 0
    loose.close()


def test_reconverging_across_rounds(reference, llm):
    exact, window = 0.0, Window(6, rule="reconverge")
    llm.reset_stats()
    loose = FlyLlama(
        LLAMA, drafter=Eagle3(EAGLE3), gate=Margin(0.5), window=window, trace=True, adaptive=False, **SETTINGS
    )
    for prompt in prompts(6):
        generate(llm, prompt, 64)
        tokens, out = generate(loose, prompt, 64)
        for record, row in zip(loose.records, single_rows(reference, tokens, out)):
            assert row.max() - row[record.choice] < TOLERANCE[LLAMA]
    exact = llm.stats.mean_accepted
    assert loose.stats.loose_accepted > 0
    assert loose.stats.mean_accepted > exact
    assert loose.stats.replayed == 0
    loose.close()


def test_a_head_on_a_hybrid_target(tmp_path):
    """Nobody trained one; what it drafts is noise, what comes out is the target's."""
    head = edit_gguf(EAGLE3, tmp_path / "hybrid.gguf", {"eagle3.target_layers": [0, 1, 3]})
    llm = FlyLlama(HYBRID, drafter=Eagle3(head), adaptive=False, **SETTINGS)
    reference = llama_cpp.Llama(str(HYBRID), **SETTINGS)
    tokens, out = generate(llm, prompts(1)[0], 32)
    assert worst_gap(reference, tokens, out) < TOLERANCE[HYBRID]
    assert llm.stats.drafted > 0
    llm.close()
    reference.close()


def _with_embedding(n):
    """The first n rows of the target's token embedding in the head's file."""
    gguf = pytest.importorskip("gguf")
    rows = next(t.data[:n].copy() for t in gguf.GGUFReader(LLAMA).tensors if t.name == "token_embd.weight")

    def edit(tensors):
        tensors["token_embd.weight"] = rows

    return edit


def test_a_head_with_a_token_embedding_of_its_own_drafts_the_same(llm, tmp_path):
    head = edit_gguf(EAGLE3, tmp_path / "own.gguf", tensors=_with_embedding(1536))
    other = FlyLlama(LLAMA, drafter=Eagle3(head), adaptive=False, **SETTINGS)
    llm.reset_stats()
    assert generate(other, prompts(1)[0]) == generate(llm, prompts(1)[0])
    assert other.stats.matched == llm.stats.matched
    other.close()


def test_a_head_may_be_set_and_replaced_in_the_middle(llm):
    expected = generate(llm, prompts(1)[0])
    late = FlyLlama(LLAMA, adaptive=False, **SETTINGS)
    tokens, out = generate(late, prompts(1)[0], 20)
    late.drafter = Eagle3(EAGLE3)  # it has seen nothing of this sequence
    rest = list(itertools.islice(late.generate([*tokens, *out], temp=0.0), 20))
    assert rest == expected[1][20:40]
    late.drafter = [PromptLookup(), Eagle3(EAGLE3)]
    late.drafter = Eagle3(EAGLE3)
    late.reset_stats()
    assert generate(late, prompts(1)[0]) == expected
    assert late.stats.acceptance > 0.3
    late.close()


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_files_that_are_no_head():
    llm = FlyLlama(LLAMA, **SETTINGS)
    with pytest.raises(IncompatibleDraftError, match="architecture llama, not an EAGLE-3 head"):
        llm.drafter = Eagle3(LLAMA)
    with pytest.raises(ValueError, match="is a head of architecture eagle3, not a model"):
        llm.drafter = DraftModel(EAGLE3)
    with pytest.raises(ValueError, match="is a head of architecture eagle3, not a model"):
        FlyLlama(EAGLE3, **SETTINGS)
    with pytest.raises(ValueError, match=r"EAGLE-3 head 'nowhere.gguf' cannot be read"):
        llm.drafter = Eagle3("nowhere.gguf")
    with pytest.raises(ValueError, match="p_min must be"):
        Eagle3(EAGLE3, p_min=-1)
    llm.close()


def _d2t(change):
    def edit(tensors):
        tensors["d2t"] = change(tensors["d2t"].copy())

    return edit


def _set_last(value):
    def change(d2t):
        d2t[-1] = value
        return d2t

    return change


HEADS = {
    "d2t without an output": ({}, without("output.weight"), "d2t.*without an output matrix"),
    "d2t above the vocabulary": ({}, _d2t(_set_last(1536)), "tokens outside the target's 1536"),
    "d2t below zero": ({}, _d2t(_set_last(-1)), "tokens outside the target's 1536"),
    "d2t of another type": ({}, _d2t(lambda d2t: d2t.astype(np.int32)), "d2t"),
    "the output of the last layer": ({"eagle3.target_layers": [1, 3, 6]}, None, "layer 6.*layers 0 to 5"),
    "a layer beyond the last": ({"eagle3.target_layers": [1, 3, 60]}, None, "layer 60.*layers 0 to 5"),
    "a layer below the first": ({"eagle3.target_layers": [-1, 3, 5]}, None, "layer -1.*layers 0 to 5"),
    "two layers": ({"eagle3.target_layers": [1, 3]}, None, "could not load the EAGLE-3 head"),
    "another width": ({"eagle3.target_hidden_size": 512}, None, "width 512, the target's have 256"),
    "a width that cannot borrow": ({"eagle3.embedding_length": 128}, None, "token embedding but is 128 wide"),
    "two blocks": ({"eagle3.block_count": 2}, None, "has 2 blocks"),
    "keys and values of other lengths": (
        {"eagle3.attention.value_length": 32},
        None,
        "could not load the EAGLE-3 head",
    ),
    "no fc": ({}, without("fc.weight"), "could not load the EAGLE-3 head"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_would_end_the_process(name, tmp_path):
    fields, tensors, message = HEADS[name]
    head = edit_gguf(EAGLE3, tmp_path / "head.gguf", fields, tensors)
    code = "llm = FlyLlama(paths[0], drafter=Eagle3(paths[1], draft_max=3), **settings)\n"
    code += "list(zip(range(9), llm.generate([5, 6])))"
    error = error_in_subprocess(code, LLAMA, head)
    assert re.search(rf"(IncompatibleDraft|Native|Value)Error: .*{message}.*; ", error), error


def test_a_small_token_embedding_is_refused(tmp_path):
    head = edit_gguf(EAGLE3, tmp_path / "small.gguf", tensors=_with_embedding(1000))
    error = error_in_subprocess("FlyLlama(paths[0], drafter=Eagle3(paths[1]), adaptive=False, **settings)", LLAMA, head)
    assert "embeds 1000 tokens of the target's 1536" in error


def test_a_target_that_does_not_publish_its_layers(tmp_path):
    target = edit_gguf(LLAMA, tmp_path / "xverse.gguf", as_architecture(LLAMA, "xverse"))
    error = error_in_subprocess(
        "FlyLlama(paths[0], drafter=Eagle3(paths[1]), adaptive=False, **settings)", target, EAGLE3
    )
    assert "does not publish the hidden states of architecture xverse" in error


def test_a_head_of_another_vocabulary(tmp_path):
    head = edit_gguf(EAGLE3, tmp_path / "foreign.gguf", other_token(EAGLE3, "pyfly"))
    with pytest.raises(IncompatibleDraftError, match=r"EAGLE-3 head .*vocabulary: token 700 is"):
        FlyLlama(LLAMA, drafter=Eagle3(head), adaptive=False, **SETTINGS)


def test_heads_have_distributions(llm):
    """At a Jensen-Shannon divergence that no two rows exceed, a fuzzy gate refuses nothing."""
    mtp = FlyLlama(HYBRID, drafter=MTP(), adaptive=False, **SETTINGS)
    for fly in (llm, mtp):
        fly.gate = Fuzzy("js", 0.7)
        fly.reset_stats()
        generate(fly, prompts(1)[0])
        assert fly.stats.loose_accepted > 0 and fly.stats.rejected_gate == 0
        fly.gate = Exact()
    mtp.close()
