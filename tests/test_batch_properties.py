"""Several requests in a batch do not disturb each other. `fuzz/test_batches.py` has random worlds of them."""

from __future__ import annotations

import numpy as np
import pytest
from test_engine_properties import EOG, N_VOCAB, PROTECTED, Oracle, Script

from pyfly_cpp import ContextFullError, Exact, Margin, Window
from pyfly_cpp._native import Batch, CallbackDrafter, ScriptedTarget

PLAIN = (Exact().nodes(), Window().config())


def run_to_full_contexts(batch, found):
    """Steps until every request has filled its context, adding to the tokens of each slot. Whether one waited."""
    has_waited = False
    while any(slot.has_request for slot in batch.slots):
        for progress in batch.step():
            slot = batch.slots[progress.slot]
            found[slot.number] += [token for _, token in slot.tokens()]
            has_waited |= progress.is_waiting
            if progress.failure is not None:
                assert isinstance(progress.failure, ContextFullError)
                slot.end()
    return has_waited


@pytest.mark.parametrize("rule", ["agree", "reconverge"])
@pytest.mark.parametrize("seed", range(4))
def test_requests_commit_what_the_oracle_commits(seed, rule):
    """Six at once, joining one after the other, where a cache of two and a half requests makes some wait."""
    script, tau, window, k = Script(seed, 0.5, -9.0), 1.0, Window(3, rule=rule), 5
    prompts = [[2, 3, 4, *([2 + (seed + i) % 7] * i)] for i in range(6)]
    with (
        ScriptedTarget(script.row, N_VOCAB, 60, 16, n_sequences=6, n_cells=150) as target,
        Batch(target) as batch,
    ):
        target.protect([PROTECTED], [EOG])
        batch.configure([(CallbackDrafter(lambda h: script.draft(h, k)), k)], n_chunk=4)
        found = {}
        for slot, prompt in zip(batch.slots, prompts):
            slot.begin(prompt, Margin(tau).nodes(), window.config())
            found[slot.number] = []
            batch.step()
            for other in batch.slots[: slot.number + 1]:
                found[other.number] += [token for _, token in other.tokens()]
        assert run_to_full_contexts(batch, found)
    for i, prompt in enumerate(prompts):
        assert found[i] == Oracle(script, tau, window, k, 60).run(1000, prompt)


@pytest.mark.parametrize("n_requests, k, n_cells", [(70, 0, 2800), (20, 5, 800), (20, 5, 400)])
def test_many_requests_in_parts_commit_what_each_does_alone(n_requests, k, n_cells):
    """From 64 rows on steps go in parts, now and then; the last ones have no room for all."""
    script, window = Script(3, 0.5, -9.0), Window(2)
    prompts = [[2, 3, 4, 2 + i % 7, 2 + i // 7 % 7, 2 + i // 49] for i in range(n_requests)]
    with (
        ScriptedTarget(script.row, N_VOCAB, 40, 512, n_sequences=n_requests, n_cells=n_cells) as target,
        Batch(target) as batch,
    ):
        target.protect([PROTECTED], [EOG])
        batch.configure([(CallbackDrafter(lambda h: script.draft(h, k)), k)])
        found = {slot.number: [] for slot in batch.slots}
        for slot, prompt in zip(batch.slots, prompts):
            slot.begin(prompt, Margin(1.0).nodes(), window.config())
        run_to_full_contexts(batch, found)
    for i, prompt in enumerate(prompts):
        assert found[i] == Oracle(script, 1.0, window, k, 40).run(1000, prompt)


@pytest.mark.parametrize("n_requests, is_cut", [(63, [False] * 5), (64, [False, False, True, False, True])])
def test_steps_of_many_requests_are_tried_whole_and_in_parts(n_requests, is_cut):
    """In parts, the first request has had its step when the last one is evaluated. The first iteration has prompts."""
    steps_of_first = set()

    def row(history):
        steps_of_first.add(batch.slots[0].counters()["steps"])
        return likes_five(history)

    with ScriptedTarget(row, N_VOCAB, 40, 512, n_sequences=n_requests) as target, Batch(target) as batch:
        batch.configure()
        for slot in batch.slots:
            slot.begin([2, 3], *PLAIN)
        found = []
        for _ in is_cut:
            steps_of_first.clear()
            batch.step()
            found.append(len(steps_of_first) > 1)
        assert found == is_cut


# ---- Prompts that join -----------------------------------------------------------------------------------------------


def likes_five(history):
    return np.eye(N_VOCAB, dtype=np.float32)[5]


@pytest.mark.parametrize("n_chunk", [16, 100])
@pytest.mark.parametrize("lengths", [[3000], [1000, 1000, 1000], [40] * 12])
def test_prompts_that_join_delay_the_others_by_no_more_than_a_chunk(n_chunk, lengths):
    """While requests are in the middle of theirs: every iteration brings each of these a step and evaluates at most
    n_chunk tokens of prompts, of all that join together."""
    with ScriptedTarget(likes_five, N_VOCAB, 4096, 512, n_sequences=16) as target, Batch(target) as batch:
        batch.configure(n_chunk=n_chunk)
        running, joining = batch.slots[:4], batch.slots[4 : 4 + len(lengths)]
        for slot in running:
            slot.begin([2, 3], *PLAIN)
        batch.step()
        for i, (slot, n) in enumerate(zip(joining, lengths)):
            slot.begin([2 + i % 7, 3 + i // 7, *([6] * (n - 2))], *PLAIN)
        n_steps = 0
        while any(len(slot.history()) == n for slot, n in zip(joining, lengths)):
            before = [min(slot.n_evaluated, n - 1) for slot, n in zip(joining, lengths)]
            progress = batch.step()
            assert [p.n_records for p in progress[:4]] == [1] * 4
            after = [min(slot.n_evaluated, n - 1) for slot, n in zip(joining, lengths)]
            assert 0 < sum(after) - sum(before) + sum(p.n_records for p in progress[4:]) <= n_chunk + len(joining)
            assert sum(after) - sum(before) <= n_chunk
            n_steps += 1
        assert n_steps <= sum(lengths) / n_chunk + len(lengths) + 1, "and no step is wasted"


def test_chunks_are_as_long_as_steps_may_take():
    """A microsecond: the shortest chunks; an hour: whole batches, once a chunk has shown that it takes less. Alone, a
    prompt is read in whole batches."""
    prompts = [[2, *([6] * 3000)], [3, *([6] * 3000)]]
    found = {}
    for us_chunk, most in ((1, 8), (3_600_000_000, 512)):
        with ScriptedTarget(likes_five, N_VOCAB, 4096, 512, n_sequences=3) as target, Batch(target) as batch:
            batch.configure(us_chunk=us_chunk)
            alone, running, joining = batch.slots
            running.begin([4, 5], *PLAIN)
            batch.step()
            joining.begin(prompts[1], *PLAIN)
            chunks = []
            while len(joining.history()) == len(prompts[1]):
                before = joining.n_evaluated
                assert batch.step()[0].n_records == 1
                chunks.append(min(joining.n_evaluated, len(prompts[1]) - 1) - before)
            assert max(chunks) == most and set(chunks[1:-1]) == {most}
            found[us_chunk] = [slot.history().tolist() for slot in (running, joining)]
            running.end()
            joining.end()
            alone.begin(prompts[0], *PLAIN)
            batch.step()
            assert alone.n_evaluated == 512
    few, many = found.values()
    assert few[1] == many[1] and few[0][: len(many[0])] == many[0]


def test_rows_of_a_prompt_are_those_of_the_last_step_and_all_of_them():
    """Also where another request has evaluated what both begin with; and none are left of a step before."""
    prompt = [2, 3, 4, 5] * 10
    with ScriptedTarget(likes_five, N_VOCAB, 100, 64, n_sequences=3) as target, Batch(target) as batch:
        batch.configure(n_chunk=30)
        first, second, third = batch.slots
        third.begin([2], *PLAIN)
        batch.step()
        first.begin(prompt, *PLAIN, all_rows=True)
        second.begin(prompt, *PLAIN, all_rows=True)
        seen = {}
        for _ in range(6):
            batch.step()
            for slot in (first, second):
                seen.setdefault(slot.number, []).extend(i for i in range(40) if slot.prompt_row(i, N_VOCAB) is not None)
        for slot in (first, second):
            assert seen[slot.number] == list(range(39)), "each of them once"


@pytest.mark.parametrize("recurrent", [None, (4, True)])
def test_owners_share_nothing(recurrent):
    """Neither with a request that runs nor with what one has left; each finds its own again."""
    options = {"n_sequences": 3, "recurrent": recurrent}
    with ScriptedTarget(likes_five, N_VOCAB, 100, 64, **options) as target, Batch(target) as batch:
        batch.configure()
        prompt = [6] * 40

        def begin(owner):
            slot = batch.find_slot(prompt, owner)
            slot.begin(prompt, *PLAIN, owner=owner)
            slot.reset_counters()
            return slot

        begin(1)
        batch.step()
        second = begin(2)
        batch.step()
        third = begin(2)
        batch.step()
        assert [slot.counters()["prefilled"] for slot in (second, third)] == [39, 0]
        for slot in batch.slots:
            slot.end(39)
        assert begin(1).n_evaluated == 39 == begin(2).n_evaluated
        third = begin(3)  # in the only slot that is left, which is another's
        assert third.n_evaluated == 0
        third.end()
        assert begin(2).n_evaluated == 0


def test_what_a_slot_holds_is_not_lost_where_nothing_can_be_shared():
    options = {"n_ctx": 100, "n_batch": 8, "n_sequences": 2, "recurrent": (4, True)}
    with ScriptedTarget(likes_five, N_VOCAB, **options) as target, Batch(target) as batch:
        batch.configure()
        first, second = batch.slots
        second.begin([6] * 10, *PLAIN)
        while second.n_left:
            batch.step()
        second.end(9)
        first.begin([6] * 40, *PLAIN)
        while first.n_left:
            batch.step()
        second.begin([6] * 40, *PLAIN)
        batch.step()
        assert second.n_evaluated > 9


def test_a_step_says_which_requests_had_a_step():
    with ScriptedTarget(likes_five, N_VOCAB, 100, 8, n_sequences=2) as target, Batch(target) as batch:
        batch.configure(n_chunk=4)
        first, second = batch.slots
        first.begin([2, 3], *PLAIN)
        assert [p.is_step for p in batch.step()] == [True]
        second.begin([4] * 9, *PLAIN)
        steps = [[(p.slot, p.is_step, p.n_records) for p in batch.step()] for _ in range(3)]
        assert [step[0] for step in steps] == [(0, True, 1)] * 3
        assert steps[0][1] == (1, False, 0), "a chunk of its prompt"
        assert steps[2][1] == (1, True, 1)


# ---- Which slot ------------------------------------------------------------------------------------------------------

SYSTEM = [*range(2, 9)] * 20 + [EOG]


def message(token, n):
    return [token] * n + [EOG]


@pytest.fixture(params=[None, (4, True)], ids=["attention", "recurrent"])
def three_slots(request):
    options = {"n_sequences": 3, "recurrent": request.param}
    with ScriptedTarget(likes_five, N_VOCAB, 1000, 64, **options) as target, Batch(target) as batch:
        target.protect([PROTECTED], [EOG])
        batch.configure()
        yield batch


def ask(batch, prompt, n=8):
    """A request and n tokens of its answer: (its slot, tokens of the prompt that were read, its tokens)."""
    slot = batch.find_slot(prompt)
    slot.reset_counters()
    slot.begin(prompt, *PLAIN)
    while slot.counters()["committed"] < n:
        batch.step()
    found = slot.number, slot.counters()["prefilled"], slot.history().tolist()
    slot.end()
    return found


def test_a_conversation_stays_whole_while_others_begin_alike(three_slots):
    """A title for it, and another conversation behind the same system prompt."""
    first, _, tokens = ask(three_slots, SYSTEM + message(2, 200))
    ask(three_slots, SYSTEM[:3] + message(7, 70))
    other, n_read, _ = ask(three_slots, SYSTEM + message(3, 100))
    assert n_read <= 101
    again, n_read, _ = ask(three_slots, [*tokens, *message(4, 10)])
    assert again == first != other
    assert n_read <= 11


def test_a_conversation_whose_answers_are_replaced_keeps_its_slot(three_slots):
    """So it does not push the others out."""
    others = [ask(three_slots, message(token, 150)) for token in (2, 3)]
    history = SYSTEM
    slots = set()
    for i in range(5):
        history = history + message(4 + i % 3, 90)
        slot, n_read, _ = ask(three_slots, [*history, PROTECTED], n=30)
        assert i == 0 or n_read <= 160
        slots.add(slot)
        history = history + message(8, 60)
    assert len(slots) == 1
    for slot, _, tokens in others:
        assert ask(three_slots, [*tokens, *message(6, 5)])[:2] == (slot, 6)


def test_the_end_of_what_two_have_in_common_is_kept(three_slots):
    for token in (2, 3):
        ask(three_slots, SYSTEM + message(token, 200))
    _, n_read, _ = ask(three_slots, SYSTEM + message(4, 100))
    assert n_read <= 101


def test_the_slot_that_was_used_longest_ago_goes(three_slots):
    slots = [ask(three_slots, message(token, 50))[0] for token in (2, 3, 4)]
    assert ask(three_slots, message(5, 50))[0] == slots[0]


# ---- A full cache ----------------------------------------------------------------------------------------------------


def test_a_request_that_replaces_a_running_one_makes_room_for_one_that_waits():
    with ScriptedTarget(likes_five, N_VOCAB, 100, 64, n_sequences=3, n_cells=100) as target, Batch(target) as batch:
        batch.configure()
        first, second, _ = batch.slots
        first.begin([2] * 60, *PLAIN)
        second.begin([3] * 50, *PLAIN)
        batch.step()
        assert [p.is_waiting for p in batch.step()] == [False, True]
        first.begin([4, 4], *PLAIN)
        assert [(p.slot, p.is_waiting, p.n_records) for p in batch.step()] == [(1, False, 1), (0, False, 1)]


def test_nobody_overtakes_a_request_that_waits():
    with ScriptedTarget(likes_five, N_VOCAB, 100, 64, n_sequences=3, n_cells=100) as target, Batch(target) as batch:
        batch.configure()
        first, second, third = batch.slots
        first.begin([2] * 60, *PLAIN)
        second.begin([3] * 50, *PLAIN)
        batch.step()
        third.begin([4, 4], *PLAIN)  # there would be room for it
        assert [p.is_waiting for p in batch.step()] == [False, True, True]
        first.end()
        assert [p.is_waiting for p in batch.step()] == [False, False]


def test_what_a_request_that_waits_was_made_to_hold_gives_way():
    with ScriptedTarget(likes_five, N_VOCAB, 100, 64, n_sequences=2, n_cells=100) as target, Batch(target) as batch:
        batch.configure()
        first, second = batch.slots
        first.begin([2] * 60, *PLAIN)
        second.begin([3] * 50, *PLAIN)
        while not batch.step()[1].is_waiting:
            pass
        second.park(30)
        for _ in range(30):
            progress = batch.step()
            assert progress[0].failure is None and progress[0].n_records == 1
        assert second.n_evaluated == 0 and progress[1].is_waiting


def test_a_recurrent_request_that_evaluates_again_before_its_draft_finds_room():
    """Its drafts need a checkpoint of everything before them, which is evaluated while the step is planned."""

    def draft(history):
        return [4, 4, 4] if len(history) % 2 else []

    options = {"n_ctx": 60, "n_batch": 32, "n_sequences": 4, "n_cells": 70, "recurrent": (0, True)}
    with ScriptedTarget(likes_five, N_VOCAB, **options) as target, Batch(target) as batch:
        batch.configure([(CallbackDrafter(draft), 3)])
        for i, slot in enumerate(batch.slots):
            slot.begin([2 + i] * (10 + i), *PLAIN)
        while any(slot.has_request for slot in batch.slots):
            for progress in batch.step():
                slot = batch.slots[progress.slot]
                assert progress.failure is None
                if len(slot.history()) > 45:
                    assert set(slot.history()[20:].tolist()) == {5}
                    slot.end()


# ---- Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [None, (0, True), (3, False)])
def test_a_row_that_fails_ends_one_request(recurrent):
    """A recurrent memory is lost where a batch fails, so that all requests of it begin again, more than a chunk of
    each, and could meet again at the row that fails."""
    n_raised = [0]

    def row(history):
        if history[0] == 3 and len(history) > 50:
            n_raised[0] += 1
            raise KeyError("mine")
        return likes_five(history)

    with ScriptedTarget(row, N_VOCAB, 100, 64, n_sequences=3, recurrent=recurrent) as target, Batch(target) as batch:
        batch.configure(n_chunk=20)
        for i, slot in enumerate(batch.slots):
            slot.begin([2 + i] * 40, *PLAIN)
        failures = {}
        for _ in range(200):
            for progress in batch.step():
                slot = batch.slots[progress.slot]
                if progress.failure is not None:
                    failures[slot.number] = progress.failure
                if progress.failure is not None or len(slot.history()) >= 95:
                    slot.end()
            if not any(slot.has_request for slot in batch.slots):
                break
        assert not any(slot.has_request for slot in batch.slots), "starved"
        assert list(failures) == [1] and isinstance(failures[1], KeyError)
        assert n_raised[0] <= 3, "together, in halves and alone"
