"""What batches and drafts cost, measured on a scripted model: sizes, order, and that nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest
from one_request import one_step

from pyfly_cpp import Exact, PromptLookup, Window
from pyfly_cpp._native import Batch, CallbackDrafter, Costs, ScriptedTarget

N_VOCAB = 50


class Model:
    """Always chooses 7, and remembers what it was shown; `fails_at`: the evaluation of a token that goes wrong."""

    def __init__(self, fails_at=None):
        self.seen = []
        self.fails_at = fails_at

    def __call__(self, history):
        self.seen.append(history.tolist())
        if len(self.seen) == self.fails_at:
            raise OSError("the cable was pulled")
        return np.eye(N_VOCAB, dtype=np.float32)[7]


def never(history):
    raise AssertionError("a caller's drafter is not to be asked about a made-up text")


def decode(batch, n=5, history=(1, 2, 3)):
    slot = batch.slots[0]
    slot.begin(list(history), Exact().nodes(), Window().config())
    out = []
    while len(out) < n:
        one_step(batch)
        out += [token for _, token in slot.tokens()]
    counters = slot.counters()
    slot.end()
    return out[:n], counters


@pytest.mark.parametrize(
    ("n_requests", "k", "sizes", "sizes_given"),
    [
        (1, 8, {}, (1, 2, 3, 4, 6, 8, 9)),
        (1, 3, {}, (1, 2, 3, 4)),
        (1, 0, {}, (1,)),
        (1, 8, {"n_batch": 7}, (1, 2, 3, 4, 6, 7)),  # no draft is longer than n_batch - 1, but all of it is one batch
        (1, 8, {"n_ctx": 5, "n_batch": 512}, (1, 2, 3, 4, 5)),
        (3, 3, {}, (1, 2, 3, 4, 6, 8, 12)),
        (4, 8, {}, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 36)),
        (4, 8, {"n_cells": 20, "n_ctx": 20}, (1, 2, 3, 4, 6, 8, 12, 16, 20)),
        (1, 200, {}, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 65)),  # deeper ones are not told apart
    ],
)
@pytest.mark.parametrize("recurrent", [None, (2, True), (0, True), (0, False)], ids=str)
def test_the_sizes_that_a_step_can_have(n_requests, k, sizes, sizes_given, recurrent):
    model = Model()
    target = ScriptedTarget(model, N_VOCAB, n_sequences=n_requests, recurrent=recurrent, **sizes)
    with target, Batch(target) as batch, CallbackDrafter(never) as own, PromptLookup().open() as lookup:
        k = min(k, sizes.get("n_batch", 512) - 1)
        batch.configure([(lookup, min(k, 2)), (own, k)], adaptive=True)
        costs = batch.measure()
        assert tuple(n for n, _ in costs.rows) == (() if recurrent == (0, False) else sizes_given)
        assert all(us > 0 for _, us in costs.rows) and costs.drafts == () and costs.catch_up == (0.0, 0.0)
        assert all(slot.n_evaluated == 0 for slot in batch.slots)
        rows = [len(history) for history in model.seen]
        for n in sizes_given if recurrent != (0, False) else ():  # each at least twice, over as many requests as it can
            assert rows.count(-(-n // n_requests)) >= 2
        assert all(0 <= token < N_VOCAB for history in model.seen for token in history)
        batch.expect(costs)


def test_nothing_is_left_behind_and_nothing_counted():
    target = ScriptedTarget(Model(), N_VOCAB)
    with target, Batch(target) as batch, PromptLookup().open() as lookup:
        batch.configure([(lookup, 4)], adaptive=True)
        expected, counters = decode(batch)
        batch.slots[0].reset_counters()
        assert batch.slots[0].n_evaluated > 0
        batch.measure()
        after = batch.slots[0].counters()
        assert batch.slots[0].n_evaluated == 0  # what the slot kept was dropped
        assert not any(after[name] for name in ("steps", "prefilled", "drafted", "seconds_verify", "seconds_prefill"))
        assert decode(batch)[0] == expected and batch.slots[0].counters()["prefilled"] == counters["prefilled"]


def test_not_while_a_request_runs():
    target = ScriptedTarget(Model(), N_VOCAB)
    with target, Batch(target) as batch:
        batch.configure([], adaptive=True)
        batch.slots[0].begin([1, 2], Exact().nodes(), Window().config())
        one_step(batch)
        with pytest.raises(ValueError, match="between requests"):
            batch.measure()
        assert one_step(batch) > 0


@pytest.mark.parametrize("recurrent", [None, (2, True)], ids=str)
@pytest.mark.parametrize("fails_at", [1, 2, 9, 30])
def test_a_target_that_fails_leaves_an_empty_batch(fails_at, recurrent):
    model = Model(fails_at)
    target = ScriptedTarget(model, N_VOCAB, n_sequences=2, recurrent=recurrent)
    with target, Batch(target) as batch, CallbackDrafter(never) as own:
        batch.configure([(own, 8)], adaptive=True)
        with pytest.raises(OSError, match="cable"):
            batch.measure()
        assert all(slot.n_evaluated == 0 for slot in batch.slots)
        batch.configure([])
        assert decode(batch)[0] == [7] * 5


SOME = Costs(rows=((1, 1000.0), (4, 2000.0)), drafts=((1, 1, 1, 300.0), (1, 1, 4, 900.0)), catch_up=(0.0, 50.0))


def test_what_is_expected_is_kept_as_long_as_the_drafters_are_the_same():
    target = ScriptedTarget(Model(), N_VOCAB)
    with target, Batch(target) as batch, CallbackDrafter(never) as own, PromptLookup().open() as lookup:
        with pytest.raises(ValueError, match="configure the batch before"):
            batch.expect(SOME)
        batch.configure([(lookup, 3), (own, 4)], adaptive=True)
        batch.expect(SOME)
        known = batch.governor()
        assert known.target_seconds == pytest.approx(
            (0.001, 0.001 + 0.001 / 3, 0.001 + 0.002 / 3, 0.002, 0.002 + 0.001 / 3)
        )
        assert known.draft_seconds[1] == pytest.approx((0.0003, 0.0005, 0.0007, 0.0009))
        assert known.catch_up_seconds == pytest.approx((0.0, 5e-5))
        batch.configure([(lookup, 2), (own, 4)])
        batch.configure([(lookup, 3), (own, 4)], adaptive=True)
        assert batch.governor() == known
        batch.configure([(own, 4)], adaptive=True)
        assert batch.governor().target_seconds == (0.0,) * 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": ((0, 5.0),)},
        {"rows": ((1, 0.0),)},
        {"rows": ((1, float("nan")),)},
        {"rows": ((1, float("inf")),)},
        {"rows": ((1, 5.0),) * 33},
        {"rows": ((2**40, 5.0),)},
        {"rows": (("1", 5.0),)},
        {"drafts": ((2, 1, 1, 5.0),)},
        {"drafts": ((-1, 1, 1, 5.0),)},
        {"drafts": ((1, 0, 1, 5.0),)},
        {"drafts": ((1, 1, -7, 5.0),)},
        {"drafts": ((1, 1, 1, -5.0),)},
        {"drafts": ((1, 1, 1, 5.0),) * 129},
        {"catch_up": (0.0, 5.0, 5.0)},
        {"catch_up": (-1.0, 5.0)},
        {"catch_up": (1.0,) * 9},
        {"change": -1.0},
        {"change": float("nan")},
    ],
    ids=str,
)
def test_costs_that_cannot_be_change_nothing(wrong):
    target = ScriptedTarget(Model(), N_VOCAB)
    with target, Batch(target) as batch, CallbackDrafter(never) as own, PromptLookup().open() as lookup:
        batch.configure([(lookup, 3), (own, 4)], adaptive=True)
        batch.expect(SOME)
        known = batch.governor()
        with pytest.raises(ValueError):
            batch.expect(SOME._replace(**wrong))
        assert batch.governor() == known
