"""A draft model that checks prompt lookup while it drafts: the same drafts, in fewer batches."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from gguf_edit import edit_gguf
from test_several_texts import assert_greedy, complete, opened

from pyfly_cpp import CrossVocabulary, DraftModel, FlyLlama, Fuzzy, PromptLookup, Stochastic
from pyfly_cpp._native import Batch, ModelDrafter

OPTIONS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. " * 3


@pytest.fixture(scope="module")
def draft_f32(tiny_draft, tmp_path_factory):
    """In F32 batches of all sizes round so nearly alike that the tokens are the same with llama.cpp's kernels."""

    def in_f32(arrays):
        arrays.update({name: array.astype(np.float32) for name, array in arrays.items()})

    return str(edit_gguf(tiny_draft, tmp_path_factory.mktemp("f32") / "draft-f32.gguf", tensors=in_f32))


def pair(target, path, p_min=0.0, **settings):
    """The draft model without lookup and with it."""
    return [ModelDrafter("draft", "model", target, path, p_min, lookup=lookup, **settings) for lookup in (0, 1)]


def histories(first, n=40):
    """A text as it grows, is taken back, changes its mind, and repeats itself."""
    rng = random.Random(1)
    text = list(first)
    for _ in range(n):
        yield list(text)
        if rng.random() < 0.2:
            del text[-rng.randrange(1, 9) :]
        if rng.random() < 0.5:
            begin = rng.randrange(len(text))
            text += text[begin : begin + rng.randrange(1, 12)]
        text += [rng.randrange(20, 1500) for _ in range(rng.randrange(3))] or [30]


def generate(llm, n, **settings):
    generator = llm.generate(llm.tokenize(PROMPT.encode()), **{"temp": 0.0, **settings})
    tokens = list(itertools.islice(generator, n))
    generator.close()
    return tokens


# ---- The same drafts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"n_batch": 3}, {"n_ctx": 64}, {"p_min": 0.4}], ids=str)
def test_the_drafts_are_those_without_lookup(settings, tiny_target, draft_f32):
    with opened(tiny_target, n_texts=1, n_ctx=512) as target:
        without, with_lookup = pair(target, draft_f32, **settings)
        with without, with_lookup:
            for k, history in zip(itertools.cycle(range(1, 17)), histories([5 + i % 17 for i in range(60)])):
                assert with_lookup.propose(history, k) == without.propose(history, k)


def test_a_text_that_repeats_itself_takes_fewer_batches(tiny_target, draft_f32):
    """A text that the draft model writes itself soon goes round in circles."""
    with opened(tiny_target, n_texts=1, n_ctx=512) as target:
        without, with_lookup = pair(target, draft_f32)
        with without, with_lookup:
            history = [5 + i % 17 for i in range(60)]
            for _ in range(16):
                drafted = without.propose(history, 16)
                assert with_lookup.propose(history, 16) == drafted
                history += drafted
            assert with_lookup.n_batches < 0.5 * without.n_batches


def test_where_nothing_repeats_it_takes_no_more_batches(tiny_target, draft_f32):
    with opened(tiny_target, n_texts=1, n_ctx=512) as target:
        without, with_lookup = pair(target, draft_f32)
        with without, with_lookup:
            for history in histories(range(20, 80), 10):
                assert with_lookup.propose(history, 2) == without.propose(history, 2)
            assert with_lookup.n_batches <= without.n_batches


def test_its_rows_are_the_draft_models(tiny_target, tiny_draft):
    """A gate that compares distributions judges its drafts as it judges those without lookup."""
    found = []
    for lookup in (False, True):
        drafter = DraftModel(tiny_draft, lookup=lookup)
        with FlyLlama(tiny_target, drafter=drafter, gate=Fuzzy("js", 0.05), draft_max=6, **OPTIONS) as fly:
            found.append((generate(fly, 120), fly.stats.loose_accepted))
    assert found[0] == found[1] and found[0][1] > 0


def test_drawn_drafts_are_the_same(tiny_target, tiny_draft):
    """A guess decides only whether the next row is there already, not which token is drawn."""
    found = []
    for lookup in (False, True):
        drafter = DraftModel(tiny_draft, lookup=lookup)
        with FlyLlama(tiny_target, drafter=drafter, gate=Stochastic(), draft_max=6, **OPTIONS) as fly:
            fly.set_seed(7)
            found.append((generate(fly, 150, temp=0.6), fly.stats.matched))
    assert found[0] == found[1] and found[0][1] > 20


# ---- At work ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("kind", ["draft", "lookup and draft", "cross"])
def test_the_text_is_the_targets(kind, adaptive, tiny_target, tiny_draft):
    draft = DraftModel(tiny_draft, lookup=True)
    drafter = {"draft": draft, "lookup and draft": [PromptLookup(), draft], "cross": CrossVocabulary(draft)}[kind]
    with FlyLlama(tiny_target, **OPTIONS) as plain:
        tokens = generate(plain, 200)
    with FlyLlama(tiny_target, drafter=drafter, adaptive=adaptive, **OPTIONS) as fly:
        assert generate(fly, 200) == tokens
        assert fly.stats.matched > 0 or adaptive


def test_several_requests_at_once(tiny_target, draft_f32):
    """Requests that draft together each have guesses of their own."""
    prompts = [[5 + i % n for i in range(40)] for n in (7, 11, 40, 3)]
    n_batches = []
    for choose in (0, 1):
        with opened(tiny_target) as target, Batch(target) as batch:
            drafters = pair(target, draft_f32)
            with drafters[0], drafters[1]:
                batch.configure([(drafters[choose], 8)])
                texts = complete(batch, prompts, [60] * 4)
                n_batches.append(drafters[choose].n_batches)
                assert all(counters["matched"] > 0 for _, counters in texts)
                batch.configure([])
        assert_greedy(tiny_target, prompts, texts)
    assert n_batches[1] < n_batches[0]


def test_costs_are_measured_without_guesses(tiny_target, tiny_draft):
    """A model loops behind made-up tokens, which lookup would copy: the first cost is that of a token at a time."""
    sizes = []
    for lookup in (0, 1):
        with opened(tiny_target, n_texts=1) as target, Batch(target) as batch:
            drafter = ModelDrafter("draft", "model", target, tiny_draft, 0.0, lookup=lookup)
            batch.configure([(drafter, 8)], adaptive=True)
            before = drafter.n_evaluated, drafter.n_batches
            batch.measure()
            sizes.append((drafter.n_evaluated - before[0]) / (drafter.n_batches - before[1]))
            batch.configure([])
            drafter.close()
    assert max(sizes) < 1.2 * min(sizes)


# ---- What cannot be --------------------------------------------------------------------------------------------------


def test_a_draft_that_cannot_be_taken_back(tiny_target, tiny_qwen35):
    with pytest.raises(ValueError, match=r"cannot be rolled back token by token.*lookup"):
        FlyLlama(tiny_target, drafter=DraftModel(tiny_qwen35, lookup=True), **OPTIONS)


def test_lookup_is_true_or_false():
    with pytest.raises(ValueError, match="lookup must be True or False"):
        DraftModel("x.gguf", lookup=1)
