"""The MTP head of a hybrid model: what it drafts, that nothing is lost, and what is refused."""

from __future__ import annotations

import itertools
import os
import re
import shutil

import llama_cpp
import pytest
from gguf_edit import edit_gguf, other_token, without
from heads import (
    DRAFT,
    HYBRID,
    LLAMA,
    SETTINGS,
    TOLERANCE,
    chained_model,
    error_in_subprocess,
    generate,
    model_fixture,
    prompts,
    single_rows,
    worst_gap,
)

from pyfly_cpp import MTP, DraftModel, Entropy, FlyLlama, Margin, PromptLookup, Window
from pyfly_cpp.decoding import companions
from pyfly_cpp.decoding.auto import choose_drafter
from pyfly_cpp.errors import IncompatibleDraftError

TOOL_ACCEPTANCE = 0.592  # llama.cpp's draft-mtp on these prompts, 3 drafts a round


reference = model_fixture(lambda: llama_cpp.Llama(str(HYBRID), **SETTINGS))
llm = model_fixture(lambda: FlyLlama(HYBRID, drafter=MTP(), adaptive=False, **SETTINGS))


def test_acceptance_and_losslessness(reference, llm):
    llm.reset_stats()
    for prompt in prompts(30):
        tokens, out = generate(llm, prompt)
        assert worst_gap(reference, tokens, out) < TOLERANCE[HYBRID]
    stats = llm.stats
    # Of the last round of an answer the tool counts what was accepted behind its end, too.
    assert stats.acceptance >= TOOL_ACCEPTANCE - 0.01
    assert stats.mean_accepted > 2.7
    assert stats.replayed == 0  # every roll-back by a snapshot
    assert dict(stats.accepted_by_drafter) == {"MTP": stats.matched}


def test_a_companion_file_drafts_the_same(llm, tmp_path):
    """The head in a file of its own: the trunk's blocks left out, as converters write it."""

    def head_only(tensors):
        for name in list(tensors):
            if name.startswith("blk.") and not name.startswith("blk.4."):
                del tensors[name]

    companion = edit_gguf(HYBRID, tmp_path / "head.gguf", tensors=head_only)
    other = FlyLlama(HYBRID, drafter=MTP(companion), adaptive=False, **SETTINGS)
    for one in (llm, other):
        one.reset_stats()
    assert [generate(other, prompt) for prompt in prompts(4)] == [generate(llm, prompt) for prompt in prompts(4)]
    assert other.stats.drafted == llm.stats.drafted
    assert other.stats.matched == llm.stats.matched
    other.close()


def test_chained_blocks_draft_one_token_each(tmp_path):
    path = chained_model(tmp_path / "chained.gguf", n_heads=2)
    assert choose_drafter(path).drafter == MTP()
    reference = llama_cpp.Llama(str(path), **SETTINGS)
    chained = FlyLlama(path, drafter=MTP(draft_max=2), **SETTINGS)
    single = FlyLlama(path, drafter=MTP(draft_max=1), **SETTINGS)
    for prompt in prompts(6):
        tokens, out = generate(chained, prompt, 60)
        assert worst_gap(reference, tokens, out) < 1e-3
        assert generate(single, prompt, 60) == (tokens, out)
    # llama.cpp's draft-mtp accepts 29 % of one and 19 % of two drafts a round on these prompts.
    assert single.stats.acceptance > 0.27
    assert chained.stats.acceptance > 0.18
    with pytest.raises(ValueError, match=r"draft_max is 3.*2 chained NextN layers.*lower draft_max"):
        FlyLlama(path, drafter=MTP(draft_max=3), **SETTINGS)
    chained.draft_max = 5  # no more than there are blocks
    generate(chained, prompts(1)[0], 20)
    assert len(chained.stats.drafted_at_depth) == 2
    for llm in (reference, chained, single):
        llm.close()


def test_p_min_and_draft_max(llm):
    generate(llm, prompts(1)[0])
    eager = FlyLlama(HYBRID, drafter=MTP(draft_max=6), **SETTINGS)
    wary = FlyLlama(HYBRID, drafter=MTP(draft_max=6, p_min=0.6), **SETTINGS)
    outs = []
    for one in (eager, wary):
        outs.append([generate(one, prompt) for prompt in prompts(3)])
    assert outs[0] == outs[1]
    assert len(eager.stats.drafted_at_depth) == 6
    assert wary.stats.drafted < eager.stats.drafted
    assert wary.stats.acceptance > eager.stats.acceptance
    eager.close()
    wary.close()


def test_long_prompts_in_batches_and_conversations(reference):
    """A head that follows a prompt batch by batch drafts as one that saw it at once; it stays in step when a prefix is
    reused, when the text is another, and when it was not asked for a while."""
    text = "\n\n".join(prompts(8))
    at_once = FlyLlama(HYBRID, drafter=MTP(), adaptive=False, **SETTINGS)
    tokens = at_once.tokenize(text.encode(), add_bos=False)[:500]
    expected = list(itertools.islice(at_once.generate(tokens, temp=0.0), 60))
    in_batches = FlyLlama(HYBRID, drafter=MTP(), n_batch=32, adaptive=False, **SETTINGS)
    assert list(itertools.islice(in_batches.generate(tokens, temp=0.0), 60)) == expected
    a, b = at_once.stats, in_batches.stats
    assert abs(a.matched - b.matched) <= 0.1 * a.matched  # other batches, other noise
    # The conversation goes on.
    at_once.reset_stats()
    longer = tokens + expected + at_once.tokenize(prompts(9)[8].encode(), add_bos=False)
    out = list(itertools.islice(at_once.generate(longer, temp=0.0), 40))
    assert worst_gap(reference, longer, out) < TOLERANCE[HYBRID]
    assert at_once.stats.prefilled < len(longer) - len(tokens)
    assert at_once.stats.acceptance > 0.35
    # Plain for a while: the head must catch up by itself.
    at_once.reset_stats()
    at_once.draft_max = 0
    history = longer + out
    history += list(itertools.islice(at_once.generate(history, temp=0.0), 150))
    assert at_once.stats.drafted == 0
    at_once.draft_max = None
    out = list(itertools.islice(at_once.generate(history, temp=0.0), 40))
    assert worst_gap(reference, history, out) < TOLERANCE[HYBRID]
    assert at_once.stats.drafted > 0
    at_once.close()
    in_batches.close()


@pytest.mark.parametrize("gate", [Entropy(0.3), Entropy(0.3, top=None), Margin(0.3)], ids=str)
def test_a_window_of_6_cannot_fit_in_a_round_of_3(llm, gate):
    expected = [generate(llm, prompt, 48) for prompt in prompts(3)]
    with pytest.warns(UserWarning, match="never accepts anything loosely, .* at most 3 drafts"):
        loose = FlyLlama(HYBRID, drafter=MTP(), gate=gate, window=Window(6), adaptive=False, **SETTINGS)
    assert [generate(loose, prompt, 48) for prompt in prompts(3)] == expected
    stats = loose.stats
    assert stats.loose_accepted == 0
    assert stats.rejected_window == 0
    assert stats.rejected_boundary > 0
    loose.close()


@pytest.mark.parametrize("rule", ["reconverge", "agree"])
def test_windows_across_rounds(reference, rule):
    window = Window(6, rule=rule, across_rounds=True)
    llm = FlyLlama(HYBRID, drafter=MTP(), gate=Margin(1.0), window=window, trace=True, adaptive=False, **SETTINGS)
    for prompt in prompts(4):
        tokens, out = generate(llm, prompt, 64)
        rows = single_rows(reference, tokens, out)
        for record, row in zip(llm.records, rows):  # the loose text's own rows: the state was right all along
            assert row.max() - row[record.choice] < TOLERANCE[HYBRID]
            assert (record.token == record.choice) == (record.origin != "loose")
            if record.origin == "loose":
                assert row.max() - row[record.token] < 1.0 + TOLERANCE[HYBRID]
    stats = llm.stats
    assert stats.loose_accepted > 0
    if rule == "agree":
        assert stats.rollbacks > 0
    assert stats.replayed > 0  # what stood behind an open mismatch was evaluated with the next round
    assert stats.mean_accepted > 2.5
    llm.close()


def test_auto_takes_the_head_else_a_draft_else_lookup(llm, tmp_path, monkeypatch):
    chosen = choose_drafter(HYBRID, DRAFT)
    assert chosen.drafter == MTP()
    assert "carries an MTP head" in chosen.reason
    assert choose_drafter(LLAMA, DRAFT).drafter == DraftModel(DRAFT)
    alone = shutil.copy(LLAMA, tmp_path / "alone.gguf")
    monkeypatch.setattr(companions, "places", lambda: [])
    assert isinstance(choose_drafter(alone).drafter, PromptLookup)
    beside = shutil.copy(DRAFT, tmp_path / "beside.gguf")
    assert choose_drafter(alone).drafter == DraftModel(beside)
    os.remove(beside)
    announced = edit_gguf(HYBRID, tmp_path / "announced.gguf", tensors=without("blk.4.nextn.eh_proj.weight"))
    chosen = choose_drafter(announced)
    assert isinstance(chosen.drafter, PromptLookup)
    assert "no MTP head that llama.cpp can run" in chosen.reason
    auto = FlyLlama(HYBRID, drafter="auto", adaptive=False, **SETTINGS)
    assert auto.drafter == MTP()
    assert "MTP head" in auto.drafter_reason
    assert generate(auto, prompts(1)[0]) == generate(llm, prompts(1)[0])
    auto.close()
    plain = FlyLlama(LLAMA, drafter="auto", draft_model=DraftModel(DRAFT), adaptive=False, **SETTINGS)
    assert plain.drafter == DraftModel(DRAFT)
    assert "no MTP head" in plain.drafter_reason
    plain.close()


def test_a_head_may_be_changed_between_requests(llm):
    expected = generate(llm, prompts(1)[0])
    llm.drafter = PromptLookup()
    assert generate(llm, prompts(1)[0])[1]
    llm.drafter = MTP(draft_max=2)
    llm.drafter = MTP()
    llm.reset_stats()
    assert generate(llm, prompts(1)[0]) == expected
    assert llm.stats.acceptance > 0.4


def test_states_that_are_saved_and_loaded(llm):
    tokens, expected = generate(llm, prompts(2)[1], 40)
    state = llm.save_state()
    generate(llm, prompts(1)[0], 20)
    llm.load_state(state)
    history = tokens + expected
    llm.reset_stats()
    a = list(itertools.islice(llm.generate(history, temp=0.0), 20))
    assert llm.stats.prefilled <= 1
    assert llm.stats.drafted > 0
    llm.reset()
    assert list(itertools.islice(llm.generate(history, temp=0.0), 20)) == a


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_a_target_without_a_head():
    with pytest.raises(IncompatibleDraftError, match=r"no MTP head.*choose another drafter"):
        FlyLlama(LLAMA, drafter=MTP(), adaptive=False, **SETTINGS)
    llm = FlyLlama(LLAMA, **SETTINGS)
    with pytest.raises(IncompatibleDraftError, match="no MTP head"):
        llm.drafter = MTP()
    assert llm.drafter is None
    with pytest.raises(IncompatibleDraftError, match="architecture qwen35, the target's is llama"):
        llm.drafter = MTP(HYBRID)
    with pytest.raises(IncompatibleDraftError, match="has no MTP head"):
        llm.drafter = MTP(LLAMA)
    with pytest.raises(ValueError, match=r"MTP head 'nowhere.gguf' cannot be read"):
        llm.drafter = MTP("nowhere.gguf")
    assert generate(llm, prompts(1)[0], 5)[1]
    llm.close()


def test_bad_arguments():
    for arguments, message in (({"draft_max": 0}, "draft_max must be"), ({"p_min": 1.5}, "p_min must be"),
                               ({"p_min": float("nan")}, "p_min must be")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            MTP(**arguments)
    with pytest.raises(ValueError, match=r"draft_max is 40.*n_batch = 32"):
        FlyLlama(HYBRID, drafter=MTP(), draft_max=40, n_batch=32, **SETTINGS)


def test_a_model_loaded_without_its_head_is_no_abort():
    error = error_in_subprocess("llm = FlyLlama(paths[0], **settings)\nllm.drafter = MTP()", HYBRID)
    assert error.startswith("ValueError: the model was loaded without its MTP head; load it again")


def _two_blocks(tensors):
    for name in [name for name in tensors if name.startswith("blk.4.")]:
        tensors[name.replace("blk.4.", "blk.5.")] = tensors[name]


TARGETS = {
    "two blocks on an architecture that runs one": (
        {"qwen35.nextn_predict_layers": 2, "qwen35.block_count": 6}, _two_blocks, "cannot run the 2 NextN layer"),
    "more NextN layers than blocks": ({"qwen35.nextn_predict_layers": 9}, None, "claims 9 NextN layers of 5 blocks"),
    "no attn_qkv": ({}, without("blk.0.attn_qkv.weight"), "lacks the tensor blk.0.attn_qkv.weight"),
    "no attn_gate": ({}, without("blk.2.attn_gate.weight"), "lacks the tensor blk.2.attn_gate.weight"),
    "a head without its trunk": ({}, without("blk.0.attn_norm.weight"), "holds an MTP head without its model"),
    "no eh_proj": ({}, without("blk.4.nextn.eh_proj.weight"), "MTP head .* lacks the tensor blk.4.nextn.eh_proj"),
    "keys and values of other lengths": ({"qwen35.attention.value_length": 32}, None, "could not (load|make)"),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_files_that_would_end_the_process(name, tmp_path):
    fields, tensors, message = TARGETS[name]
    path = edit_gguf(HYBRID, tmp_path / "broken.gguf", fields, tensors)
    code = (
        "llm = FlyLlama(paths[0], drafter=MTP(draft_max=3), **settings)\nlist(zip(range(5), llm.generate([5, 6, 7])))"
    )
    error = error_in_subprocess(code, path)
    assert re.search(rf"(ValueError|IncompatibleDraftError): .*{message}.*; ", error), error


def test_a_companion_of_another_model(tmp_path):
    wide = edit_gguf(HYBRID, tmp_path / "wide.gguf", {"qwen35.embedding_length": 512})
    error = error_in_subprocess("FlyLlama(paths[0], drafter=MTP(paths[1]), adaptive=False, **settings)", HYBRID, wide)
    assert "width 512, the target's have 256; use the head of this very model" in error
    foreign = edit_gguf(HYBRID, tmp_path / "foreign.gguf", other_token(HYBRID, "pyfly"))
    error = error_in_subprocess(
        "FlyLlama(paths[0], drafter=MTP(paths[1]), adaptive=False, **settings)", HYBRID, foreign
    )
    assert error.startswith("IncompatibleDraftError: the MTP head")
    assert "token 700 is" in error
