"""Draft heads (EAGLE-3, MTP, DFlash, DSpark): what they draft, that nothing is lost, and what is refused."""

from __future__ import annotations

import itertools
import random
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import gguf
import llama_cpp
import numpy as np
import pytest
from gguf_edit import as_architecture, edit_gguf, other_token, without
from heads import (
    DFLASH,
    DRAFT,
    DSPARK,
    EAGLE3,
    HYBRID,
    LLAMA,
    SETTINGS,
    TOLERANCE,
    chained_model,
    error_in_subprocess,
    generate,
    prompts,
    single_rows,
    take,
    worst_gap,
)

from pyfly_cpp import (
    MTP,
    DFlash,
    DraftModel,
    DSpark,
    Eagle3,
    Exact,
    FlyBatch,
    FlyLlama,
    Fuzzy,
    Margin,
    PromptLookup,
    Window,
)
from pyfly_cpp.decoding import Decoding, companions
from pyfly_cpp.decoding.resolve import Resolved, resolve
from pyfly_cpp.errors import IncompatibleDraftError
from pyfly_cpp.measure.generator import Generator


@dataclass(frozen=True)
class Head:
    """A head, and what llama.cpp's own tool (draft-eagle3, draft-mtp, ...) makes of it."""

    kind: Callable
    path: Path | None
    """Its file; None: in the target's."""
    target: Path
    k: int
    """Drafts a step of the measurement."""
    acceptance: float
    """Accepted of drafted on the first `n_prompts` prompts."""
    n_prompts: int

    def __call__(self, path=None, **fields):
        path = path or self.path
        return self.kind(**fields) if path is None else self.kind(path, **fields)


HEADS = {
    "EAGLE-3": Head(Eagle3, EAGLE3, LLAMA, 3, 0.520, 30),
    "MTP": Head(MTP, None, HYBRID, 3, 0.592, 30),
    "DFlash": Head(DFlash, DFLASH, LLAMA, 7, 0.162, 6),
    "DSpark": Head(DSpark, DSPARK, LLAMA, 7, 0.331, 6),
}
OF_LLAMA = ["EAGLE-3", "DFlash", "DSpark"]
BLOCKS = ["DFlash", "DSpark"]


@pytest.fixture(scope="module")
def references():
    """The targets without a drafter, by path."""
    llms = {path: llama_cpp.Llama(str(path), **SETTINGS) for path in (LLAMA, HYBRID)}
    yield llms
    for llm in llms.values():
        llm.close()


@pytest.fixture(scope="module")
def opened():
    """opened(drafter, target=LLAMA, **options): a model that is closed at the end."""
    llms = []

    def open_one(drafter=None, target=LLAMA, **options):
        llms.append(FlyLlama(target, drafter=drafter, **{"adaptive": False, **SETTINGS, **options}))
        return llms[-1]

    yield open_one
    for llm in llms:
        llm.close()


@pytest.fixture(scope="module")
def loaded(opened):
    """loaded(name): the target of a head with it, the same object each time."""
    llms = {}

    def load(name):
        head = HEADS[name]
        if name not in llms:
            llms[name] = opened(head(draft_max=head.k), head.target)
        llms[name].reset_stats()
        return llms[name]

    return load


def drafts_of(llm):
    """The drafts of the last generation: {how many tokens they followed: what was drafted}."""
    drafts = {}
    for _, records in itertools.groupby(llm.records, key=lambda record: record.round):
        of_step = list(records)
        drafts[of_step[0].position] = [r.token for r in of_step if r.depth] + list(of_step[-1].rejected)
    return drafts


@pytest.mark.parametrize("name", HEADS)
def test_acceptance_and_losslessness(name, references, loaded):
    llm, head = loaded(name), HEADS[name]
    for i, prompt in enumerate(prompts(head.n_prompts)):
        tokens, out = generate(llm, prompt)
        assert i % 3 or worst_gap(references[head.target], tokens, out) < TOLERANCE[head.target]
    stats = llm.stats
    # Of the last step of an answer the tool counts what was accepted behind its end, too.
    assert stats.acceptance >= head.acceptance - 0.01
    assert stats.mean_accepted > 0.95 * (1 + head.k * head.acceptance)
    assert stats.replayed == 0, "every roll-back by a snapshot"
    assert dict(stats.accepted_by_drafter) == {name: stats.matched}
    assert len(stats.drafted_at_depth) == head.k


@pytest.mark.parametrize("name", HEADS)
def test_long_prompts_in_batches_and_conversations(name, references, opened):
    """A head that follows a prompt batch by batch drafts as one that saw it at once; it stays in step when a prefix is
    reused, when the text is another, and when it was not asked for a while."""
    head = HEADS[name]
    reference, most = references[head.target], TOLERANCE[head.target]
    at_once = opened(head(draft_max=head.k), head.target)
    in_batches = opened(head(draft_max=head.k), head.target, n_batch=32, n_ubatch=16)
    tokens = at_once.tokenize("\n\n".join(prompts(8)).encode(), add_bos=False)[:400]
    expected = take(at_once.generate(tokens, temp=0.0), 60)
    assert worst_gap(reference, tokens, take(in_batches.generate(tokens, temp=0.0), 60)) < most
    assert abs(at_once.stats.acceptance - in_batches.stats.acceptance) < 0.1
    # The conversation goes on.
    at_once.reset_stats()
    longer = tokens + expected + at_once.tokenize(prompts(9)[8][:80].encode(), add_bos=False)
    out = take(at_once.generate(longer, temp=0.0), 40)
    assert worst_gap(reference, longer, out) < most
    assert at_once.stats.prefilled < len(longer) - len(tokens) and at_once.stats.drafted > 0
    # Plain for a while: the head must catch up by itself.
    at_once.reset_stats()
    at_once.draft_max = 0
    history = longer + out
    history += take(at_once.generate(history, temp=0.0), 120)
    assert at_once.stats.drafted == 0
    at_once.draft_max = None
    assert worst_gap(reference, history, take(at_once.generate(history, temp=0.0), 40)) < most
    assert at_once.stats.drafted > 0


@pytest.mark.parametrize(
    ("name", "across_rounds", "k"),
    [
        ("EAGLE-3", True, 3),
        ("MTP", True, 3),
        *((name, across_rounds, 15) for name in BLOCKS for across_rounds in (False, True)),
    ],
)
def test_windows(name, across_rounds, k, references, opened):
    """The rows of a loose text are its own: the state was right all along."""
    head, window = HEADS[name], Window(6, rule="reconverge", across_rounds=across_rounds)
    llm = opened(head(draft_max=k), head.target, gate=Margin(1.0), window=window, trace=True)
    most = TOLERANCE[head.target]
    for prompt in prompts(1 if name in BLOCKS else 4):
        tokens, out = generate(llm, prompt, 64)
        for record, row in zip(llm.records, single_rows(references[head.target], tokens, out)):
            assert row.max() - row[record.choice] < most
            assert (record.token == record.choice) == (record.origin != "loose")
            assert record.origin != "loose" or row.max() - row[record.token] < 1.0 + most
    stats = llm.stats
    assert name in BLOCKS or (stats.loose_accepted > 0 and stats.mean_accepted > 2.5)
    # What stood behind an open mismatch is evaluated again with the next step where the state is recurrent.
    assert (stats.replayed > 0) == (name == "MTP") or (name in BLOCKS and across_rounds)


@pytest.mark.parametrize(("name", "k", "p_min"), [("MTP", 6, 0.6), ("DFlash", 15, 0.4), ("DSpark", 15, 0.4)])
def test_p_min(name, k, p_min, opened):
    """The probability of a token; of DSpark what its confidence head says."""
    head = HEADS[name]
    eager, wary = (opened(head(draft_max=k, p_min=p), head.target) for p in (0.0, p_min))
    assert [generate(wary, prompt, 48) for prompt in prompts(3)] == [
        generate(eager, prompt, 48) for prompt in prompts(3)
    ]
    assert len(eager.stats.drafted_at_depth) == k
    assert 0 < wary.stats.drafted < eager.stats.drafted
    assert wary.stats.acceptance > eager.stats.acceptance


@pytest.mark.parametrize("name", OF_LLAMA)
def test_a_head_may_be_set_and_replaced_in_the_middle(name, loaded, opened):
    head, late = HEADS[name], opened()
    early = loaded(name)
    expected = generate(early, prompts(1)[0])
    tokens, out = generate(late, prompts(1)[0], 20)
    late.drafter = head(draft_max=head.k)  # it has seen nothing of this sequence
    assert take(late.generate([*tokens, *out], temp=0.0), 20) == expected[1][20:40]
    late.drafter = [PromptLookup(), head(draft_max=head.k)]
    late.drafter = head(draft_max=head.k)
    late.reset_stats()
    assert generate(late, prompts(1)[0]) == expected
    assert late.stats.matched == pytest.approx(early.stats.matched, abs=2)


@pytest.mark.parametrize("name", OF_LLAMA)
def test_a_head_on_a_hybrid_target(name, references, opened, tmp_path):
    """Nobody trained one; what it drafts is noise, what comes out is the target's."""
    layers = "eagle3.target_layers" if name == "EAGLE-3" else "dflash.target_layers"
    path = edit_gguf(HEADS[name].path, tmp_path / "hybrid.gguf", {layers: [0, 1, 3]})
    llm = opened(HEADS[name](path, draft_max=4), HYBRID)
    tokens, out = generate(llm, prompts(1)[0], 24)
    assert worst_gap(references[HYBRID], tokens, out) < TOLERANCE[HYBRID]
    assert llm.stats.drafted > 0


@pytest.mark.parametrize("name", HEADS)
def test_heads_have_distributions(name, loaded):
    """At a Jensen-Shannon divergence that no two rows exceed, a fuzzy gate refuses nothing."""
    llm = loaded(name)
    llm.gate = Fuzzy("js", 0.7)
    generate(llm, prompts(1)[0])
    assert llm.stats.loose_accepted > 0 and llm.stats.rejected_gate == 0
    llm.gate = Exact()


# ---- EAGLE-3 ------------------------------------------------------------------------------------------------------


def test_only_tokens_of_the_reduced_vocabulary_are_drafted(loaded):
    llm = loaded("EAGLE-3")
    d2t = next(t for t in gguf.GGUFReader(EAGLE3).tensors if t.name == "d2t").data
    llm.trace = True
    generate(llm, prompts(1)[0])
    drafted = {r.token for r in llm.records if r.depth} | {t for r in llm.records for t in r.rejected}
    llm.trace = False
    assert drafted <= set(d2t.tolist())
    assert len(drafted) > 10


def _with_embedding(n):
    """The first n rows of the target's token embedding in the head's file."""
    rows = next(t.data[:n].copy() for t in gguf.GGUFReader(LLAMA).tensors if t.name == "token_embd.weight")

    def edit(tensors):
        tensors["token_embd.weight"] = rows

    return edit


def test_a_head_with_a_token_embedding_of_its_own_drafts_the_same(loaded, opened, tmp_path):
    llm, head = loaded("EAGLE-3"), edit_gguf(EAGLE3, tmp_path / "own.gguf", tensors=_with_embedding(1536))
    other = opened(Eagle3(head, draft_max=3))
    assert generate(other, prompts(1)[0]) == generate(llm, prompts(1)[0])
    assert other.stats.matched == llm.stats.matched


# ---- MTP ----------------------------------------------------------------------------------------------------------


def test_a_companion_file_drafts_the_same(loaded, opened, tmp_path):
    """The head in a file of its own: the trunk's blocks left out, as converters write it."""

    def head_only(tensors):
        for name in list(tensors):
            if name.startswith("blk.") and not name.startswith("blk.4."):
                del tensors[name]

    companion = edit_gguf(HYBRID, tmp_path / "head.gguf", tensors=head_only)
    llm, other = loaded("MTP"), opened(MTP(companion), HYBRID)
    assert [generate(other, prompt) for prompt in prompts(4)] == [generate(llm, prompt) for prompt in prompts(4)]
    assert other.stats.drafted == llm.stats.drafted
    assert other.stats.matched == llm.stats.matched


def test_chained_blocks_draft_one_token_each(opened, tmp_path):
    path = chained_model(tmp_path / "chained.gguf", n_heads=2)
    assert resolve(path).drafter == MTP()
    reference = llama_cpp.Llama(str(path), **SETTINGS)
    chained = opened(MTP(draft_max=2), path)
    single = opened(MTP(draft_max=1), path)
    for prompt in prompts(6):
        tokens, out = generate(chained, prompt, 60)
        assert worst_gap(reference, tokens, out) < 1e-3
        assert generate(single, prompt, 60) == (tokens, out)
    # llama.cpp's draft-mtp accepts 29 % of one and 19 % of two drafts a step on these prompts.
    assert single.stats.acceptance > 0.27
    assert chained.stats.acceptance > 0.18
    with pytest.raises(ValueError, match=r"draft_max is 3.*2 chained NextN layers.*lower draft_max"):
        FlyLlama(path, drafter=MTP(draft_max=3), **SETTINGS)
    with pytest.raises(ValueError, match=r"draft_max is 3.*2 chained NextN layers"):
        FlyLlama(path, drafter=MTP(), draft_max=3, **SETTINGS)
    FlyLlama(path, drafter=MTP(), draft_max=3, **{**SETTINGS, "adaptive": True}).close()  # at most so many
    generator = Generator(chained, Resolved((MTP(),)))
    generator.require([Decoding(drafter="mtp", draft_max=2)])
    with pytest.raises(ValueError, match=r"draft_max is 3.*2 chained NextN layers"):
        generator.require([Decoding(drafter="mtp", draft_max=3)])
    chained.decoding = Decoding()
    chained.drafter = MTP(draft_max=2)
    chained.draft_max = 5  # no more than there are blocks
    generate(chained, prompts(1)[0], 20)
    assert len(chained.stats.drafted_at_depth) == 2
    reference.close()


def test_auto(loaded, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(companions, "places", lambda: [])
    announced = edit_gguf(HYBRID, tmp_path / "announced.gguf", tensors=without("blk.4.nextn.eh_proj.weight"))
    chosen = resolve(announced)
    assert isinstance(chosen.drafters[0], PromptLookup)
    assert "no MTP head that llama.cpp can run" in chosen.reason
    auto = opened("auto", HYBRID)
    assert auto.drafter == MTP()
    assert "MTP head" in auto.drafter_reason
    assert generate(auto, prompts(1)[0]) == generate(loaded("MTP"), prompts(1)[0])
    plain = opened("auto", draft_model=DraftModel(DRAFT))
    assert plain.drafter == DraftModel(DRAFT)  # it is not governed
    assert "no MTP head" in plain.drafter_reason


def test_lookup_as_well_asks_for_no_more_states_of_a_recurrent_model(opened):
    both = opened(Resolved((PromptLookup(), DraftModel(DRAFT)), (PromptLookup(),)), HYBRID, adaptive=True)
    assert both.context_params.n_rs_seq == 8
    for prompt in prompts(2):
        assert generate(both, prompt * 3) == generate(opened(None, HYBRID), prompt * 3)
    assert dict(both.stats.accepted_by_drafter)["prompt lookup"] > 50


def test_a_head_may_be_changed_between_requests(loaded):
    llm = loaded("MTP")
    expected = generate(llm, prompts(1)[0])
    llm.drafter = PromptLookup()
    assert generate(llm, prompts(1)[0])[1]
    llm.drafter = MTP(draft_max=2)
    llm.drafter = MTP(draft_max=3)
    llm.reset_stats()
    assert generate(llm, prompts(1)[0]) == expected
    assert llm.stats.acceptance > 0.4


def test_a_request_again_drafts_as_before(opened):
    """From its first step on, also where drafts are deeper than the states that a step keeps, so that each step begins
    with a copy of the state."""
    llm = opened(MTP(), HYBRID, draft_max=3, trace=True)
    llm.draft_max = 7
    bias, found = {llm.token_eos(): -100.0, llm.token_bos(): -100.0}, []
    for _ in range(2):
        llm(prompts(1)[0], max_tokens=250, temperature=0, logit_bias=bias)  # longer than rows are kept
        found.append((llm.records, drafts_of(llm)))
    assert llm.stats.checkpoints > 20 and found[0][0][0].depth > 0
    assert found[1] == found[0]


def test_states_that_are_saved_and_loaded(loaded):
    llm = loaded("MTP")
    tokens, expected = generate(llm, prompts(2)[1], 40)
    state = llm.save_state()
    generate(llm, prompts(1)[0], 20)
    llm.load_state(state)
    history = tokens + expected
    llm.reset_stats()
    a = take(llm.generate(history, temp=0.0), 20)
    assert llm.stats.prefilled <= 1
    assert llm.stats.drafted > 0
    llm.reset()
    assert take(llm.generate(history, temp=0.0), 20) == a


# ---- DFlash and DSpark --------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("name", BLOCKS)
def test_200_rejections_at_every_depth(name, opened):
    """A text that follows the head's own drafts and leaves each at another depth. Who decodes that text has the same
    drafts behind every rejection; the noise of batches of other sizes moves a few."""
    k, n_texts, n_steps = 15, {"DFlash": 3, "DSpark": 9}[name], 23
    oracle = opened(HEADS[name](draft_max=k), gate=Margin(1e6), window=Window(0), trace=True)  # commits most drafts
    subject = opened(HEADS[name](draft_max=k), trace=True)
    rng, n_same, depths = random.Random(3), 0, []
    for prompt in prompts(n_texts):
        text = oracle.tokenize(prompt.encode(), add_bos=False)[:40]
        n_given, expected = len(text), {}
        for _ in range(n_steps):
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


@pytest.mark.parametrize("name", BLOCKS)
def test_the_longest_draft(name, opened):
    """As many as a block has: of DSpark the anchor's row drafts, too. Asked for more, a head drafts that many."""
    llm, most = opened(HEADS[name]()), {"DFlash": 15, "DSpark": 16}[name]
    generate(llm, prompts(1)[0], 20)
    assert len(llm.stats.drafted_at_depth) == 15
    llm.draft_max = 30
    llm.reset_stats()
    generate(llm, prompts(1)[0], 20)
    assert len(llm.stats.drafted_at_depth) == most
    with pytest.raises(ValueError, match=rf"is 17, but the {name} head .* blocks of {most} tokens; lower draft_max"):
        opened(HEADS[name](draft_max=17))


def _drafts(path, name="DFlash", k=7, target=LLAMA, **options):
    llm = FlyLlama(
        target, drafter=HEADS[name](path, draft_max=k), adaptive=False, trace=True, **{**SETTINGS, **options}
    )
    generate(llm, prompts(1)[0], 40)
    drafts = drafts_of(llm)
    llm.close()
    return drafts


def _reduced(tensors):
    """The output matrix of every token but the first 40."""
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
            "dflash.selector_top_k": 6}  # fmt: skip  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_files_that_say_the_same_in_another_way(name, tmp_path):
    source, expected = HEADS[name].path, _drafts(None, name)
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


def test_a_narrow_window(references, opened, tmp_path):
    fields = {"dflash.attention.sliding_window": 24, "dflash.attention.sliding_window_pattern": [True, True]}
    llm = opened(DFlash(edit_gguf(DFLASH, tmp_path / "narrow.gguf", fields), draft_max=15))
    tokens, out = generate(llm, prompts(1)[0])
    assert worst_gap(references[LLAMA], tokens, out) < TOLERANCE[LLAMA]
    assert llm.stats.matched > 0


# ---- What is refused ----------------------------------------------------------------------------------------------


def test_a_head_by_its_name(tmp_path, monkeypatch):
    shutil.copy(EAGLE3, tmp_path / "myhead.gguf")
    monkeypatch.setenv("PYFLY_MODELS", str(tmp_path))
    with FlyLlama(LLAMA, drafter="eagle3:myhead", **SETTINGS) as llm:
        assert llm.drafter == Eagle3("myhead")


def test_files_that_are_no_such_head(opened):
    llm, hybrid = opened(), opened(target=HYBRID)
    for drafter, message in (
        (MTP(), r"no MTP head.*choose another drafter"),
        (MTP(HYBRID), "architecture qwen35, the target's is llama"),
        (MTP(LLAMA), "has no MTP head"),
        (Eagle3(LLAMA), "architecture llama, not an EAGLE-3 head"),
        (Eagle3(DFLASH), "architecture dflash, not an EAGLE-3 head"),
        (DFlash(LLAMA), "architecture llama, not a DFlash head"),
        (DSpark(EAGLE3), "architecture eagle3, not a DSpark head"),
        (DSpark(DFLASH), r"no Markov head; it is a DFlash head, use DFlash\(...\)"),
        (DFlash(DSPARK), r"has a Markov head; it is a DSpark head, use DSpark\(...\)"),
    ):
        with pytest.raises(IncompatibleDraftError, match=message):
            llm.drafter = drafter
    for path in (EAGLE3, DFLASH):
        with pytest.raises(ValueError, match=r"is a head of architecture .*, not a model"):
            llm.drafter = DraftModel(path)
        with pytest.raises(ValueError, match=r"is a head of architecture .*, not a model"):
            FlyLlama(path, **SETTINGS)
    for kind in (MTP, Eagle3, DFlash, DSpark):
        with pytest.raises(ValueError, match=r"head .*'nowhere.gguf'"):
            llm.drafter = kind("nowhere.gguf")
    with pytest.raises(ValueError, match="the model was loaded without its MTP head; load it again"):
        hybrid.drafter = MTP()
    assert llm.drafter is None and generate(llm, prompts(1)[0], 5)[1]


@pytest.mark.parametrize("kind", [MTP, Eagle3, DFlash, DSpark])
def test_bad_arguments(kind):
    for arguments, message in (({"draft_max": 0}, "draft_max must be"), ({"p_min": 1.5}, "p_min must be"),
                               ({"p_min": float("nan")}, "p_min must be")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kind("head.gguf", **arguments)


def _d2t(change):
    def edit(tensors):
        tensors["d2t"] = change(tensors["d2t"].copy())

    return edit


def _set_last(value):
    def change(d2t):
        d2t[-1] = value
        return d2t

    return change


def _two_blocks(tensors):
    for name in [name for name in tensors if name.startswith("blk.4.")]:
        tensors[name.replace("blk.4.", "blk.5.")] = tensors[name]


UNFIT_EAGLE3 = {
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
    "a small token embedding": ({}, _with_embedding(1000), "embeds 1000 tokens of the target's 1536"),
}


UNFIT_BLOCKS = {
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


UNFIT_MTP = {
    "two blocks on an architecture that runs one": (
        {"qwen35.nextn_predict_layers": 2, "qwen35.block_count": 6}, _two_blocks, "cannot run the 2 NextN layer"),
    "more NextN layers than blocks": ({"qwen35.nextn_predict_layers": 9}, None, "claims 9 NextN layers of 5 blocks"),
    "no attn_qkv": ({}, without("blk.0.attn_qkv.weight"), "lacks the tensor blk.0.attn_qkv.weight"),
    "no attn_gate": ({}, without("blk.2.attn_gate.weight"), "lacks the tensor blk.2.attn_gate.weight"),
    "a head without its trunk": ({}, without("blk.0.attn_norm.weight"), "holds an MTP head without its model"),
    "no eh_proj": ({}, without("blk.4.nextn.eh_proj.weight"), "MTP head .* lacks the tensor blk.4.nextn.eh_proj"),
    "keys and values of other lengths": ({"qwen35.attention.value_length": 32}, None, "could not (load|make)"),
}  # fmt: skip
"""Targets that carry the head."""


def test_files_that_would_end_the_process(tmp_path):
    """In a child, one after the other: llama.cpp would abort."""
    cases = [("EAGLE-3", EAGLE3, *case) for case in UNFIT_EAGLE3.values()]
    cases += [(name, HEADS[name].path, *case) for name, *case in UNFIT_BLOCKS.values()]
    cases += [("MTP", HYBRID, *case) for case in UNFIT_MTP.values()]
    paths = [edit_gguf(source, tmp_path / f"{i}.gguf", *edits) for i, (_, source, *edits, _) in enumerate(cases)]
    code = """
        import re
        kinds = {"EAGLE-3": Eagle3, "DFlash": DFlash, "DSpark": DSpark}
        for path, (kind, why) in zip(paths[1:], CASES):
            try:
                if kind == "MTP":
                    llm = FlyLlama(path, drafter=MTP(draft_max=3), **settings)
                else:
                    llm = FlyLlama(paths[0], drafter=kinds[kind](path, draft_max=3, p_min=0.1), **settings)
                list(zip(range(9), llm.generate([5, 6, 7])))
            except (ValueError, IncompatibleDraftError, NativeError) as error:
                assert re.search(why + ".*; ", str(error)) and str(path) in str(error), (kind, why, str(error))
            else:
                raise AssertionError((kind, why))"""
    code = textwrap.dedent(code).replace("CASES", repr([(name, why) for name, *_, why in cases]))
    assert error_in_subprocess(code, LLAMA, *paths) == "no error"


def test_a_target_that_does_not_publish_its_layers(tmp_path):
    target = edit_gguf(LLAMA, tmp_path / "xverse.gguf", as_architecture(LLAMA, "xverse"))  # computes what llama does
    code = "FlyLlama(paths[0], drafter=Eagle3(paths[1]), adaptive=False, **settings)"
    if llama_cpp.llama_supports_gpu_offload():
        assert "does not publish the hidden states of architecture xverse" in error_in_subprocess(code, target, EAGLE3)
        return
    prompts = [f"Question: Anna has {n} apples and buys {n + 3} more. How many" for n in range(5, 9)]
    found = []
    for path in (LLAMA, target):
        batch = FlyBatch(path, 3, n_ctx=256, drafter=Eagle3(EAGLE3, draft_max=3), adaptive=False, verbose=False)
        with batch:
            answers = batch.complete(prompts, max_tokens=40, temperature=0.0)
            found.append(([answer["choices"] for answer in answers], batch.stats.matched, batch.stats.drafted))
    assert found[0] == found[1]
    assert found[0][1] > 0


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_model(name, opened, tmp_path):
    head = HEADS[name]
    source = head.path or HYBRID
    foreign = edit_gguf(source, tmp_path / "foreign.gguf", other_token(source, "pyfly"))
    with pytest.raises(IncompatibleDraftError, match=rf"{name} head .*token 700 is"):
        opened(head(foreign), head.target)
    if name == "MTP":
        wide = edit_gguf(HYBRID, tmp_path / "wide.gguf", {"qwen35.embedding_length": 512})
        with pytest.raises(ValueError, match="width 512, the target's have 256; use the head of this very model"):
            opened(MTP(wide), HYBRID)
