"""A draft model that verifies prompt lookup while it drafts: the same drafts, with fewer evaluations."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from gguf_edit import edit_gguf
from test_several_texts import assert_greedy, complete, opened

from pyfly_cpp import DraftModel, FlyLlama, Fuzzy, PromptLookup
from pyfly_cpp._native import Batch, ModelDrafter
from pyfly_cpp.decoding.drafters import MultiLevel

OPTIONS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. " * 3
LOOKUP = PromptLookup(max_ngram_size=3, min_ngram_size=1, num_pred_tokens=16)
CHEAP = 16  # rows that cost the draft model as much as one, as it is told


@pytest.fixture(scope="module")
def draft_f32(tiny_draft, tmp_path_factory):
    """In F32 batches of all sizes round so nearly alike that the tokens are the same."""

    def in_f32(arrays):
        arrays.update({name: array.astype(np.float32) for name, array in arrays.items()})

    return str(edit_gguf(tiny_draft, tmp_path_factory.mktemp("f32") / "draft-f32.gguf", tensors=in_f32))


def pair(target, path, p_min=0.0, **settings):
    """The draft model alone, and with prompt lookup."""
    alone = ModelDrafter("draft model", "model", target, path, p_min, **settings)
    return alone, ModelDrafter("multi-level", "multi", target, path, p_min, [LOOKUP.native], **settings)


def told(batch, drafter, row_us):
    """Tells a drafter what a batch of n rows costs its model, in us."""
    batch.configure([(drafter, 8)], adaptive=True)
    own = tuple((0, n, row_us(n)) for n in (1, 2, 4, 8, CHEAP))
    batch.expect(batch.measure()._replace(own=own))


def histories(llm_text, n=30):
    """A text as it grows, is taken back, changes its mind, and repeats itself."""
    rng = random.Random(1)
    text = list(llm_text)
    for _ in range(n):
        yield list(text)
        if rng.random() < 0.2:
            del text[-rng.randrange(1, 9) :]
        if rng.random() < 0.5:
            begin = rng.randrange(len(text))
            text += text[begin : begin + rng.randrange(1, 12)]
        text += [rng.randrange(20, 1500) for _ in range(rng.randrange(3))] or [30]


# ---- The same drafts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"n_batch": 3}, {"n_ctx": 64}, {"p_min": 0.4}], ids=str)
def test_the_drafts_are_those_of_the_draft_model_alone(settings, tiny_target, draft_f32):
    with opened(tiny_target, n_texts=1, n_ctx=512) as target, Batch(target) as batch:
        alone, multi = pair(target, draft_f32, **settings)
        with alone, multi:
            told(batch, multi, lambda n: 1000.0 + n)
            before = alone.n_batches, multi.n_batches
            prompt = [5 + i % 17 for i in range(60)]
            for k, history in zip(itertools.cycle([8, 1, 3, 16, 40]), histories(prompt)):
                assert multi.propose(history, k) == alone.propose(history, k)
            # What was tried and wrong cost no evaluation of its own.
            assert multi.n_batches - before[1] <= alone.n_batches - before[0]
            batch.configure([])


def test_where_the_text_repeats_itself_it_takes_fewer_evaluations(tiny_target, draft_f32):
    """A text that the draft model writes itself soon goes round in circles."""
    with opened(tiny_target, n_texts=1, n_ctx=512) as target, Batch(target) as batch:
        alone, multi = pair(target, draft_f32)
        with alone, multi:
            told(batch, multi, lambda n: 1000.0 + n)
            n_alone, n_multi = alone.n_batches, multi.n_batches
            history = [5 + i % 17 for i in range(60)]
            for _ in range(16):
                drafted = alone.propose(history, 16)
                assert multi.propose(history, 16) == drafted
                history += drafted
            assert multi.n_batches - n_multi < 0.75 * (alone.n_batches - n_alone)
            batch.configure([])


def test_dear_rows_are_not_tried(tiny_target, draft_f32):
    """Where a second row costs as much as a second evaluation, it drafts like the draft model alone."""
    with opened(tiny_target, n_texts=1) as target, Batch(target) as batch:
        alone, multi = pair(target, draft_f32)
        with alone, multi:
            told(batch, multi, lambda n: 1e9 * n)
            before = alone.n_evaluated, multi.n_evaluated
            for history in histories([5 + i % 17 for i in range(60)], 10):
                assert multi.propose(history, 8) == alone.propose(history, 8)
            assert multi.n_evaluated - before[1] == alone.n_evaluated - before[0]
            batch.configure([])


def test_its_rows_are_the_draft_models(tiny_target, tiny_draft):
    """A gate that compares distributions judges its drafts as it judges the draft model's."""
    options = {"gate": Fuzzy("js", 0.05), "draft_max": 6, **OPTIONS}
    found = []
    for drafter in (DraftModel(tiny_draft), MultiLevel(DraftModel(tiny_draft), LOOKUP)):
        fly = FlyLlama(tiny_target, drafter=drafter, **options)
        generator = fly.generate(fly.tokenize(PROMPT.encode()), temp=0.0)
        found.append((list(itertools.islice(generator, 120)), fly.stats.loose_accepted))
        generator.close()
        fly.close()
    assert found[0] == found[1] and found[0][1] > 0


# ---- At work ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"draft_max": 8}, {"adaptive": True}], ids=str)
def test_the_text_is_the_targets(settings, tiny_target, tiny_draft):
    texts = []
    for drafter in (None, MultiLevel(DraftModel(tiny_draft), LOOKUP)):
        fly = FlyLlama(tiny_target, drafter=drafter, **(settings if drafter else {}), **OPTIONS)
        generator = fly.generate(fly.tokenize(PROMPT.encode()), temp=0.0)
        texts.append(list(itertools.islice(generator, 200)))
        generator.close()
        if drafter is not None and "draft_max" in settings:
            assert dict(fly.stats.accepted_by_drafter)["multi-level"] > 50
        fly.close()
    assert texts[0] == texts[1]


def test_several_texts_at_once(tiny_target, draft_f32):
    """Texts that draft together get what each gets alone, in fewer batches of the draft model than without lookup."""
    prompts = [[5 + i % n for i in range(40)] for n in (7, 11, 40, 3)]
    n_batches = []
    for choose in (0, 1):
        with opened(tiny_target) as target, Batch(target) as batch:
            drafters = pair(target, draft_f32)
            with drafters[0], drafters[1]:
                drafter = drafters[choose]
                told(batch, drafter, lambda n: 1000.0 + n)
                batch.configure([(drafter, 8)])
                before = drafter.n_batches
                texts = complete(batch, prompts, [60] * 4)
                n_batches.append(drafter.n_batches - before)
                assert all(counters["matched"] > 0 for _, counters in texts)
                batch.configure([])
        assert_greedy(tiny_target, prompts, texts)
    assert n_batches[1] < n_batches[0]


def test_what_its_rows_cost_is_measured(tiny_target, tiny_draft):
    with opened(tiny_target, n_texts=2) as target, Batch(target) as batch:
        alone, multi = pair(target, tiny_draft)
        with alone, multi:
            batch.configure([(alone, 4), (multi, 4)], adaptive=True)
            costs = batch.measure()
            assert [(drafter, n) for drafter, n, _ in costs.own] == [(1, n) for n in (1, 2, 3, 4, 6, 8)]
            assert all(us > 0 for *_, us in costs.own)
            batch.expect(costs)
            batch.expect(costs._replace(own=((0, 2, 5.0),)))  # the draft model alone has no use for it
            for wrong in ((2, 1, 5.0), (1, 0, 5.0), (1, 1, 0.0), (1, 1, float("nan"))):
                with pytest.raises(ValueError, match="measure them again"):
                    batch.expect(costs._replace(own=(wrong,)))
            batch.configure([])


# ---- What cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(PromptLookup(),), (None,), ("x.gguf",), (DraftModel("x.gguf"), None)], ids=str)
def test_what_it_takes(parts):
    with pytest.raises(ValueError, match="MultiLevel takes a DraftModel and a PromptLookup"):
        MultiLevel(*parts)


def test_a_draft_that_cannot_be_taken_back(tiny_target, tiny_qwen35):
    with pytest.raises(ValueError, match="cannot be rolled back token by token, which MultiLevel needs"):
        FlyLlama(tiny_target, drafter=MultiLevel(DraftModel(tiny_qwen35)), **OPTIONS)


def test_no_file(tiny_target):
    with pytest.raises(ValueError, match="draft model"):
        FlyLlama(tiny_target, drafter=MultiLevel(DraftModel("nowhere.gguf")), **OPTIONS)
