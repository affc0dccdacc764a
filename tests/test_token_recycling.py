"""Token recycling on a scripted target, against what its rows say."""

from __future__ import annotations

import random

import numpy as np
import pytest
from one_text import Engine

from pyfly_cpp import Exact, TokenRecycling, Window
from pyfly_cpp._native import Batch, ScriptedTarget
from pyfly_cpp.drafters import Host

N_VOCAB = 12


def open_for(target, **fields):
    return TokenRecycling(**fields).open(Host(lambda: target, 4, False, {}, lambda: None))


def row_of(token, seed=0):
    """A row that follows from the last token alone; some tokens are impossible."""
    row = np.random.default_rng([seed, token]).normal(size=N_VOCAB).astype(np.float32)
    row[token] = -np.inf
    return row


def expected(known, history, n_candidates, n_most):
    """`known`: the tokens whose rows were seen."""

    def candidates(token):
        if token not in known:
            return []
        row = row_of(token)
        return [int(t) for t in np.argsort(-row, kind="stable")[:n_candidates] if np.isfinite(row[t])]

    out, before, token = [], history[-2] if len(history) > 1 else history[-1], history[-1]
    while len(out) < n_most and candidates(token):
        thought_of = [t for t in candidates(token) if t != token and t in candidates(before)]
        before, token = token, (thought_of or candidates(token))[0]
        out.append(token)
    return out


@pytest.mark.parametrize("n_candidates", [1, 2, 8, 32])
def test_what_is_proposed(n_candidates):
    """The rows of every token that the target has evaluated behind the prompt, drafts that were rejected included."""
    rng = random.Random(n_candidates)
    with ScriptedTarget(lambda history: row_of(int(history[-1])), N_VOCAB) as target:
        drafter = open_for(target, n_candidates=n_candidates, num_pred_tokens=6)
        with drafter, Engine(target) as engine:
            engine.configure(Exact(), Window(), [(drafter, 6)])
            assert drafter.propose([1, 2], 6) == []  # nothing was seen
            known = set()
            for _ in range(6):
                history = [rng.randrange(N_VOCAB) for _ in range(rng.randrange(1, 4))]
                engine.begin(history)
                for _ in range(5):
                    before = engine.history().tolist()
                    proposal = expected(known, before, n_candidates, 6)
                    assert drafter.propose(before, 6) == proposal
                    assert drafter.propose(before, 2) == proposal[:2]
                    engine.round()
                    known |= {before[-1], *proposal}
    assert len(known) > 3


def test_of_several_texts_only_those_that_draft_teach():
    target = ScriptedTarget(lambda history: row_of(int(history[-1])), N_VOCAB, n_sequences=2)
    with target, open_for(target) as drafter, Batch(target) as batch:
        batch.configure([(drafter, 3)])
        window = Window().config()
        batch.slots[0].begin([3], Exact().nodes(), window)
        batch.slots[1].begin([7], Exact().nodes(), window, draft_max=[0])
        batch.step()
        assert drafter.propose([3], 1) == expected({3}, [3], 8, 1)
        assert drafter.propose([7], 1) == []
        batch.slots[1].begin([7], Exact().nodes(), window)
        batch.step()
        assert drafter.propose([7], 1) == expected({7}, [7], 8, 1)  # shared by all texts


def test_a_broken_row_teaches_nothing():
    target = ScriptedTarget(lambda history: np.full(N_VOCAB, np.nan, dtype=np.float32), N_VOCAB)
    with target, open_for(target) as drafter, Batch(target) as batch:
        batch.configure([(drafter, 3)])
        batch.slots[0].begin([3], Exact().nodes(), Window().config())
        (progress,) = batch.step()
        assert progress.failure is not None
        assert drafter.propose([3], 3) == []


def test_tokens_it_cannot_know():
    with ScriptedTarget(lambda history: row_of(int(history[-1])), N_VOCAB) as target, open_for(target) as drafter:
        for history in ([-1], [N_VOCAB], [2**31 - 1, 1], [1, -5]):
            assert drafter.propose(history, 4) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_candidates": 0}, "n_candidates must be an integer in 1..32"),
        ({"n_candidates": 33}, "n_candidates"),
        ({"num_pred_tokens": 0}, "num_pred_tokens must be an integer >= 1"),
        ({"num_pred_tokens": 1.5}, "num_pred_tokens"),
    ],
)
def test_fields_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        TokenRecycling(**fields)
