"""Requests that share beginnings, one after the other, with a drafter that keeps something of each: no request stands
in the way of the next, and one that is asked again is drafted, and answered, as it was."""

from __future__ import annotations

import random

import pytest
from heads import DFLASH, DRAFT, DSPARK, EAGLE3, HYBRID, LLAMA, SETTINGS, prompts, take

from pyfly_cpp import MTP, CrossVocabulary, DFlash, DraftModel, DSpark, Eagle3, FlyBatch, FlyLlama, Margin, Window

HEADS = {
    "eagle3": (LLAMA, lambda: Eagle3(EAGLE3, draft_max=4)),
    "dflash": (LLAMA, lambda: DFlash(DFLASH, draft_max=6)),
    "dspark": (LLAMA, lambda: DSpark(DSPARK, draft_max=6)),
    "mtp": (HYBRID, lambda: MTP(draft_max=3)),
}


@pytest.fixture(params=HEADS)
def llm(request):
    target, drafter = HEADS[request.param]
    fly = FlyLlama(target, drafter=drafter(), adaptive=False, **SETTINGS)
    yield fly
    fly.close()


def drafted(llm, prompt, n):
    """n tokens behind a prompt; (them, how many drafts they took, how many of these were right)."""
    llm.reset_stats()
    return take(llm.generate(prompt, temp=0.0), n), llm.stats.drafted, llm.stats.matched


def test_a_prompt_that_ends_before_what_was_kept_begins(llm):
    rng = random.Random(1)
    long = [rng.randrange(5, 1500) for _ in range(400)]
    other = long[:100] + [rng.randrange(5, 1500) for _ in range(50)]
    alone = drafted(llm, long[:4], 40)
    for prompt in (long, other, long[:4], [7, 8, 9, 10], long[:4]):
        last = drafted(llm, prompt, 40)
        assert last[1] > 0
    assert last[0] == alone[0] and abs(last[2] - alone[2]) <= 2


def test_a_question_that_is_asked_again_is_drafted_as_it_was(llm):
    question = llm.tokenize(" ".join(prompts(4)).encode(), add_bos=False)[:100]
    out, _, n_right = drafted(llm, question, 250)
    for _ in range(2):
        again, _, n_right_again = drafted(llm, question, 250)
        assert again == out
        assert abs(n_right_again - n_right) <= 2  # other batches, other noise
        assert drafted(llm, question[:3], 40)[1] > 0


def test_the_first_answer_of_a_loose_gate_is_the_second(llm):
    llm.gate, llm.window = Margin(1.0), Window(1, rule="reconverge")
    for prompt in prompts(2):
        tokens = llm.tokenize(prompt.encode(), add_bos=False)
        llm.reset()
        first = drafted(llm, tokens, 60)
        assert llm.stats.loose_accepted > 0
        assert drafted(llm, tokens, 60) == first


MODELS = {
    "draft": (LLAMA, lambda: DraftModel(DRAFT)),
    "cross": (LLAMA, lambda: CrossVocabulary(DraftModel(DRAFT))),
    **HEADS,
}


@pytest.mark.parametrize("kind", MODELS)
def test_drafters_evaluate_for_each_owner(kind):
    """What is held for one would make the drafts of another come sooner."""
    path, drafter = MODELS[kind]
    with FlyBatch(path, 1, drafter=drafter(), adaptive=False, **SETTINGS) as batch:
        prompt = batch.tokenize(" ".join(prompts(2)).encode())
        (native,) = batch.model.decoder.drafters

        def n_evaluated(owner):
            before = native.n_evaluated
            request = batch.llama.new_request(
                prompt, batch.llama.new_output(prompt, max_tokens=8), sampling={"temp": 0.0}
            )
            request.owner = owner
            batch.write(request).result(60)
            return native.n_evaluated - before

        first, second, again = n_evaluated(1), n_evaluated(2), n_evaluated(2)
        assert first == second > again


@pytest.mark.parametrize("kind", ["draft", "cross"])
def test_a_draft_model_reads_what_two_requests_begin_with_once(kind):
    """In two slots, as the first is to stay whole; both answers are those of a model that was asked nothing else."""
    path, drafter = MODELS[kind]
    with FlyLlama(path, **SETTINGS) as llm:
        text = llm.tokenize(" ".join(prompts(8)).encode(), add_bos=False)
        asked = [text[:300] + text[300 + 40 * i : 340 + 40 * i] for i in range(2)]
        expected = [llm(prompt, max_tokens=8, temperature=0.0)["choices"][0]["text"] for prompt in asked]
    with FlyBatch(path, 2, drafter=drafter(), adaptive=False, **SETTINGS) as batch:
        (native,) = batch.model.decoder.drafters
        n_evaluated = []
        for prompt, right in zip(asked, expected):
            before = native.n_evaluated
            answer = batch.submit(prompt, max_tokens=8, temperature=0.0).result()
            assert answer["choices"][0]["text"] == right
            n_evaluated.append(native.n_evaluated - before)
        assert n_evaluated[0] > 300 and n_evaluated[1] < 150
