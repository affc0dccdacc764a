"""DFlash and DSpark heads, which draft a block in one pass: what they draft, that nothing is lost, what is refused."""

from __future__ import annotations

import itertools
import random
import textwrap

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf, other_token, without
from heads import (
    DFLASH,
    DSPARK,
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
    take,
    worst_gap,
)

from pyfly_cpp import DFlash, DraftModel, DSpark, Eagle3, Exact, FlyLlama, Fuzzy, Margin, PromptLookup, Window
from pyfly_cpp.errors import IncompatibleDraftError

K = 7
# llama.cpp's draft-dflash and draft-dspark on the first 6 prompts, K drafts a round: accepted of drafted.
TOOL_ACCEPTANCE = {"DFlash": 0.162, "DSpark": 0.331}


reference = model_fixture(lambda: llama_cpp.Llama(str(LLAMA), **SETTINGS))
dflash = model_fixture(lambda: FlyLlama(LLAMA, drafter=DFlash(DFLASH, draft_max=K), adaptive=False, **SETTINGS))
dspark = model_fixture(lambda: FlyLlama(LLAMA, drafter=DSpark(DSPARK, draft_max=K), adaptive=False, **SETTINGS))


@pytest.fixture(params=["DFlash", "DSpark"])
def name(request):
    return request.param


@pytest.fixture
def llm(name, request):
    """A target with the head; its counters begin at zero."""
    fly = request.getfixturevalue(name.lower())
    fly.reset_stats()
    return fly


def head(name, path=None, **fields):
    return {"DFlash": DFlash, "DSpark": DSpark}[name](path or {"DFlash": DFLASH, "DSpark": DSPARK}[name], **fields)


def opened(drafter, **options):
    return FlyLlama(LLAMA, drafter=drafter, **{"adaptive": False, **SETTINGS, **options})


def drafts_of(llm):
    """The drafts of the last generation: {how many tokens they followed: what was drafted}."""
    drafts = {}
    for _, records in itertools.groupby(llm.records, key=lambda record: record.round):
        of_round = list(records)
        drafts[of_round[0].position] = [r.token for r in of_round if r.depth] + list(of_round[-1].rejected)
    return drafts


def test_acceptance_and_losslessness(reference, llm, name):
    for i, prompt in enumerate(prompts(6)):
        tokens, out = generate(llm, prompt)
        assert i % 3 or worst_gap(reference, tokens, out) < TOLERANCE[LLAMA]
    stats = llm.stats
    assert stats.acceptance == pytest.approx(TOOL_ACCEPTANCE[name], abs=0.01)
    assert dict(stats.accepted_by_drafter) == {name: stats.matched}
    assert len(stats.drafted_at_depth) == K


class Forced:
    """A logits processor: while there is one, the next token is that of a given text."""

    def __init__(self, text):
        self.text = text

    def __call__(self, history, scores):
        if len(history) < len(self.text):
            scores[:] = -np.inf
            scores[self.text[len(history)]] = 0.0
        return scores


def continued(llm, text, n_given, n):
    """n tokens behind the first n_given of a text, which is forced to its end."""
    processors = llama_cpp.LogitsProcessorList([Forced(text)])
    return take(llm.generate(text[:n_given], temp=0.0, logits_processor=processors), n)


@pytest.mark.slow
def test_200_rejections_at_every_depth(name):
    """A text that follows the head's own drafts and leaves each at another depth. Who decodes that text has the same
    drafts behind every rejection; the noise of batches of other sizes moves a few."""
    k, n_texts, n_rounds = 15, {"DFlash": 3, "DSpark": 9}[name], 23
    oracle = opened(head(name, draft_max=k), gate=Margin(1e6), window=Window(0), trace=True)  # commits most drafts
    subject = opened(head(name, draft_max=k), trace=True)
    rng, n_same, depths = random.Random(3), 0, []
    for prompt in prompts(n_texts):
        text = oracle.tokenize(prompt.encode(), add_bos=False)[:40]
        n_given, expected = len(text), {}
        for _ in range(n_rounds):
            continued(oracle, text, len(text), k + 1)
            draft = drafts_of(oracle)[len(text)]
            depths.append(rng.randrange(len(draft)))
            expected[len(text)] = draft
            text = [*text, *draft[: depths[-1]], (draft[depths[-1]] + 1) % 1500]
        subject.reset()
        assert continued(subject, text, n_given, len(text) - n_given) == text[n_given:]
        found = drafts_of(subject)
        # Records end with a text's end, and so may a draft there.
        n_same += sum(all(a == b for a, b in zip(found[n], draft)) for n, draft in expected.items())
    assert set(depths) == set(range(k)) and (len(depths) > 200 or name == "DFlash")
    assert n_same > 0.97 * len(depths)
    oracle.close()
    subject.close()


def test_long_prompts_in_batches_and_conversations(reference, name):
    """The head follows a prompt batch by batch, a text that goes on, and one that it did not draft for."""
    at_once, in_batches = opened(head(name, draft_max=K)), opened(head(name, draft_max=K), n_batch=32, n_ubatch=16)
    tokens = at_once.tokenize("\n\n".join(prompts(8)).encode(), add_bos=False)[:300]
    expected = take(at_once.generate(tokens, temp=0.0), 30)
    assert worst_gap(reference, tokens, take(in_batches.generate(tokens, temp=0.0), 30)) < TOLERANCE[LLAMA]
    assert abs(at_once.stats.acceptance - in_batches.stats.acceptance) < 0.1
    at_once.reset_stats()
    longer = tokens + expected + at_once.tokenize(prompts(9)[8][:80].encode(), add_bos=False)
    out = take(at_once.generate(longer, temp=0.0), 20)
    assert at_once.stats.prefilled < len(longer) - len(tokens)
    at_once.draft_max = 0
    history = longer + out + take(at_once.generate(longer + out, temp=0.0), 80)
    at_once.draft_max = None
    at_once.reset_stats()
    out = take(at_once.generate(history, temp=0.0), 20)
    assert worst_gap(reference, history, out) < TOLERANCE[LLAMA]
    assert at_once.stats.drafted > 0
    at_once.close()
    in_batches.close()


@pytest.mark.parametrize("across_rounds", [False, True])
def test_a_window_fits_in_a_block(reference, name, across_rounds):
    window = Window(6, rule="reconverge", across_rounds=across_rounds)
    llm = opened(head(name, draft_max=15), gate=Margin(1.0), window=window, trace=True)
    for prompt in prompts(1):
        tokens, out = generate(llm, prompt, 40)
        for record, row in zip(llm.records, single_rows(reference, tokens, out)):
            assert row.max() - row[record.choice] < TOLERANCE[LLAMA]
            assert (record.token == record.choice) == (record.origin != "loose")
    assert llm.stats.replayed == 0 or across_rounds
    llm.close()


def test_p_min(name):
    """Of DFlash the probability of a token, of DSpark what its confidence head says."""
    eager, wary = opened(head(name, draft_max=15)), opened(head(name, draft_max=15, p_min=0.4))
    assert [generate(wary, prompt, 48) for prompt in prompts(3)] == [
        generate(eager, prompt, 48) for prompt in prompts(3)
    ]
    assert 0 < wary.stats.drafted < eager.stats.drafted
    assert wary.stats.acceptance > eager.stats.acceptance
    eager.close()
    wary.close()


def test_the_longest_draft(name):
    """As many as a block has: of DSpark the anchor's row drafts, too. Asked for more, a head drafts that many."""
    llm, most = opened(head(name)), {"DFlash": 15, "DSpark": 16}[name]
    generate(llm, prompts(1)[0], 20)
    assert len(llm.stats.drafted_at_depth) == 15
    llm.draft_max = 30
    llm.reset_stats()
    generate(llm, prompts(1)[0], 20)
    assert len(llm.stats.drafted_at_depth) == most
    llm.close()
    with pytest.raises(ValueError, match=rf"is 17, but the {name} head .* blocks of {most} tokens; lower draft_max"):
        opened(head(name, draft_max=17))


def test_a_head_may_be_set_in_the_middle(llm, name):
    expected = generate(llm, prompts(1)[0])
    late = FlyLlama(LLAMA, adaptive=False, **SETTINGS)
    tokens, out = generate(late, prompts(1)[0], 20)
    late.drafter = head(name, draft_max=K)  # it has seen nothing of this sequence
    assert take(late.generate([*tokens, *out], temp=0.0), 20) == expected[1][20:40]
    late.drafter = [PromptLookup(), head(name, draft_max=K)]
    late.drafter = head(name, draft_max=K)
    late.reset_stats()
    assert generate(late, prompts(1)[0]) == expected
    assert late.stats.matched == pytest.approx(llm.stats.matched, abs=2)
    late.close()


def test_rows_of_a_block(llm):
    """At a Jensen-Shannon divergence that no two rows exceed, a fuzzy gate refuses nothing."""
    llm.gate = Fuzzy("js", 0.7)
    generate(llm, prompts(1)[0])
    assert llm.stats.loose_accepted > 0 and llm.stats.rejected_gate == 0
    llm.gate = Exact()


# ---- What else a file may say ----------------------------------------------------------------------------------------


def _drafts(path, name="DFlash", k=K, target=LLAMA, **options):
    llm = FlyLlama(target, drafter=head(name, path, draft_max=k), adaptive=False, trace=True, **{**SETTINGS, **options})
    generate(llm, prompts(1)[0], 40)
    drafts = drafts_of(llm)
    llm.close()
    return drafts


def _reduced(tensors):
    """The output matrix of every token but the first 40."""
    gguf = pytest.importorskip("gguf")
    output = next(t.data for t in gguf.GGUFReader(LLAMA).tensors if t.name == "output.weight")
    tensors["output.weight"], tensors["d2t"] = output[40:].copy(), np.arange(40, 1536, dtype=np.int64)
    if "markov_w2.weight" in tensors:
        tensors["markov_w2.weight"] = tensors["markov_w2.weight"][40:]


def _second_version(tensors):
    """Convolutions that change nothing, and a selector to which all pairs are alike."""
    base = np.zeros((2, 3, 256), dtype=np.float32)
    base[:, 0] = 1.0
    for block in ("blk.0", "blk.1"):
        for part in ("attn", "ffn"):
            tensors[f"{block}.{part}_conv_base"] = base
            tensors[f"{block}.{part}_conv_proj.weight"] = np.zeros((2 * 3 * 8, 256), dtype=np.float16)
    for side in ("predecessor", "successor"):
        tensors[f"selector_{side}.weight"] = np.zeros((1536, 32), dtype=np.float16)
    tensors["selector_hidden.weight"] = np.zeros((32, 256), dtype=np.float16)


SELECTOR = {"dflash.conv_kernel_size": 3, "dflash.conv_group_size": 32, "dflash.selector_rank": 32,
            "dflash.selector_top_k": 6}  # fmt: skip


def test_files_that_say_the_same_in_another_way(name, tmp_path):
    source, expected = head(name).model_path, _drafts(None, name)
    assert len(expected) > 10
    sections = {"dflash.rope.dimension_sections": [32, 0, 0, 0]}  # of a target with positions in several dimensions
    assert _drafts(edit_gguf(source, tmp_path / "mrope.gguf", sections), name) == expected
    wide = {"dflash.attention.sliding_window": 2000, "dflash.attention.sliding_window_pattern": [True, False]}
    assert _drafts(edit_gguf(source, tmp_path / "window.gguf", wide), name) == expected
    reduced = _drafts(edit_gguf(source, tmp_path / "reduced.gguf", tensors=_reduced), name)
    assert all(token >= 40 for draft in reduced.values() for token in draft)
    assert any(token < 40 for draft in expected.values() for token in draft)
    if name == "DFlash":
        second = edit_gguf(source, tmp_path / "second.gguf", SELECTOR, _second_version)
        assert _drafts(second) == expected


def test_attention_that_is_causal(tmp_path):
    """Then the first tokens of a block do not depend on how long it is; else they may."""
    causal = edit_gguf(DFLASH, tmp_path / "causal.gguf", {"dflash.attention.causal": True})
    short, long = _drafts(causal, k=2), _drafts(causal, k=15)
    common = short.keys() & long.keys()
    assert len(common) > 5 and all(short[n] == long[n][:2] for n in common)
    assert _drafts(DFLASH) != _drafts(causal)


def test_a_narrow_window(reference, tmp_path):
    fields = {"dflash.attention.sliding_window": 24, "dflash.attention.sliding_window_pattern": [True, True]}
    llm = opened(head("DFlash", edit_gguf(DFLASH, tmp_path / "narrow.gguf", fields), draft_max=15))
    tokens, out = generate(llm, prompts(1)[0])
    assert worst_gap(reference, tokens, out) < TOLERANCE[LLAMA]
    assert llm.stats.matched > 0
    llm.close()


def test_a_hybrid_target(name, tmp_path):
    """Nobody trained a head for it; what it drafts is noise, what comes out is the target's."""
    path = edit_gguf(head(name).model_path, tmp_path / "hybrid.gguf", {"dflash.target_layers": [0, 1, 3]})
    llm = FlyLlama(HYBRID, drafter=head(name, path, draft_max=4), adaptive=False, **SETTINGS)
    reference = llama_cpp.Llama(str(HYBRID), **SETTINGS)
    tokens, out = generate(llm, prompts(1)[0], 24)
    assert worst_gap(reference, tokens, out) < TOLERANCE[HYBRID]
    assert llm.stats.drafted > 0
    llm.close()
    reference.close()


# ---- What is refused -------------------------------------------------------------------------------------------------


def test_files_that_are_no_such_head():
    llm = FlyLlama(LLAMA, **SETTINGS)
    for drafter, message in (
        (DFlash(LLAMA), "architecture llama, not a DFlash head"),
        (DSpark(EAGLE3), "architecture eagle3, not a DSpark head"),
        (Eagle3(DFLASH), "architecture dflash, not an EAGLE-3 head"),
        (DSpark(DFLASH), r"no Markov head; it is a DFlash head, give it as DFlash\(...\)"),
        (DFlash(DSPARK), r"has a Markov head; it is a DSpark head, give it as DSpark\(...\)"),
    ):
        with pytest.raises(IncompatibleDraftError, match=message):
            llm.drafter = drafter
    with pytest.raises(ValueError, match="is a head of architecture dflash, not a model"):
        llm.drafter = DraftModel(DFLASH)
    with pytest.raises(ValueError, match=r"DSpark head 'nowhere.gguf' cannot be read"):
        llm.drafter = DSpark("nowhere.gguf")
    with pytest.raises(ValueError, match="p_min must be"):
        DFlash(DFLASH, p_min=-1)
    llm.close()


HEADS = {
    "the output of the last layer": ("DFlash", {"dflash.target_layers": [1, 3, 6]}, None, "layer 6.*layers 0 to 5"),
    "a layer below the first": ("DFlash", {"dflash.target_layers": [-1, 3, 5]}, None, "layer -1.*layers 0 to 5"),
    "two layers": ("DFlash", {"dflash.target_layers": [1, 3]}, None, "could not load the DFlash head"),
    "another width": ("DFlash", {"dflash.embedding_length": 128}, None, "width 128, the target's have 256"),
    "no mask token": ("DFlash", {"tokenizer.ggml.mask_token_id": None}, None, "names no mask token"),
    "a mask token outside": ("DSpark", {"tokenizer.ggml.mask_token_id": 1536}, None, "mask token 1536 of 1536"),
    "a block of one row": ("DFlash", {"dflash.block_size": 1}, None, "blocks of 1 rows; from 2"),
    "a block of 64 rows": ("DSpark", {"dflash.block_size": 64}, None, "blocks of 64 rows; from 2 to 32"),
    "no block size": ("DSpark", {"dflash.block_size": None}, None, "blocks of 0 rows"),
    "blocks of DeepSeek-V4": ("DSpark", {"dflash.hyper_connection.count": 4}, None, "made of DeepSeek-V4 blocks"),
    "keys and values of other lengths": (
        "DFlash", {"dflash.attention.value_length": 32}, None, "could not load the DFlash head"),
    "d2t without an output": (
        "DFlash", {}, lambda t: t.update(d2t=np.arange(9, dtype=np.int64)), "d2t.*without an output matrix"),
    "no confidence head": ("DSpark", {}, without("conf_proj.weight"), "no confidence head, which p_min needs"),
    "no second matrix": ("DSpark", {}, without("markov_w2.weight"), "could not load the DSpark head"),
    "more candidates than tokens": (
        "DFlash", {**SELECTOR, "dflash.selector_top_k": 1600}, _second_version, "among 1600 tokens of 1536"),
    "a selector without its sizes": ("DFlash", {}, _second_version, "could not load the DFlash head"),
}  # fmt: skip


def test_heads_that_would_end_the_process(tmp_path):
    paths = []
    for i, (name, fields, tensors, _) in enumerate(HEADS.values()):
        paths.append(edit_gguf(head(name).model_path, tmp_path / f"{i}.gguf", fields, tensors))
    code = """
        import re
        llm = FlyLlama(paths[0], **settings)
        for path, (kind, why) in zip(paths[1:], CASES):
            try:
                llm.drafter = {"DFlash": DFlash, "DSpark": DSpark}[kind](path, draft_max=3, p_min=0.1)
                list(zip(range(9), llm.generate([5, 6])))
            except (ValueError, IncompatibleDraftError, NativeError) as error:
                assert re.search(why + ".*; ", str(error)) and str(path) in str(error), (why, str(error))
            else:
                raise AssertionError(why)"""
    cases = [(name, message) for name, _, _, message in HEADS.values()]
    code = textwrap.dedent(code).replace("CASES", repr(cases))
    assert error_in_subprocess(code, LLAMA, *paths) == "no error"


def test_a_head_of_another_vocabulary(name, tmp_path):
    path = edit_gguf(head(name).model_path, tmp_path / "foreign.gguf", other_token(DFLASH, "pyfly"))
    with pytest.raises(IncompatibleDraftError, match=rf"{name} head .*vocabulary: token 700 is"):
        opened(head(name, path))
