"""Configuration objects: ranges, written forms, equality."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyfly_cpp import All, Any, DraftModel, Entropy, Exact, Margin, PromptLookup, Window, parse_gate
from pyfly_cpp.drafters import require_drafters


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("exact", Exact()),
        ("margin:0.3", Margin(0.3)),
        ("margin", Margin()),
        ("entropy:0.3", Entropy(0.3)),
        ("entropy:0.5:5", Entropy(0.5, top=5)),
        ("entropy-normalized:0.3", Entropy(0.3, top=None)),
        (" all(entropy:0.3,any(margin:0.5,exact)) ", All(Entropy(0.3), Any(Margin(0.5), Exact()))),
    ],
)
def test_written_forms(text, gate):
    assert parse_gate(text) == gate
    assert parse_gate(str(gate)) == gate
    assert hash(parse_gate(str(gate))) == hash(gate)


@given(st.floats(0, 100), st.floats(0, 1), st.integers(1, 32))
def test_written_forms_keep_the_gate(x, share, n):
    for gate in (Margin(x), Entropy(x, top=n), Entropy(share, top=None)):
        assert parse_gate(str(gate)) == gate


@pytest.mark.parametrize(
    "text",
    ["", "exac", "margin:", "margin:a", "margin:0.1:2", "entropy:0.3:0", "all()", "exact:1", "margin:-1", "margin:nan"],
)
def test_unreadable_gates(text):
    with pytest.raises(ValueError, match=r"gate|tau|theta|top"):
        parse_gate(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Margin(-0.1),
        lambda: Margin(math.nan),
        lambda: Margin(math.inf),
        lambda: Margin("0.3"),
        lambda: Margin(True),
        lambda: Entropy(-1),
        lambda: Entropy(math.nan),
        lambda: Entropy(1.5, top=None),
        lambda: Entropy(0.3, top=0),
        lambda: Entropy(0.3, top=33),
        lambda: Entropy(0.3, top=2.5),
        lambda: All(),
        lambda: Any(3),
        lambda: Window(-1),
        lambda: Window(2.5),
        lambda: Window(True),
        lambda: Window(rule="agreee"),
        lambda: Window(tail=-1),
        lambda: Window(across_rounds="yes"),
        lambda: PromptLookup(0),
        lambda: PromptLookup(num_pred_tokens=0),
        lambda: PromptLookup(max_ngram_size=2, min_ngram_size=3),
        lambda: PromptLookup(match="last"),
        lambda: DraftModel("x", draft_max=0),
        lambda: DraftModel("x", p_min=1.5),
        lambda: DraftModel("x", p_min=math.nan),
        lambda: DraftModel("x", n_ctx=4),
    ],
)
def test_out_of_range(make):
    with pytest.raises(ValueError, match=r"must|needs|gate"):
        make()


def test_defaults_of_across_rounds():
    assert not Window().outlives_round
    assert Window(rule="reconverge").outlives_round
    assert Window(across_rounds=True).outlives_round
    assert not Window(rule="reconverge", across_rounds=False).outlives_round


def test_latest_and_earliest_lookup():
    history = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    assert PromptLookup(2, 3).propose(history) == [4, 8, 1]
    assert PromptLookup(2, 3, match="earliest").propose(history) == [3, 9, 1]
    assert PromptLookup(2, 3).propose([]) == []
    assert PromptLookup(2, 3).propose([5]) == []
    assert PromptLookup(2, 3).propose([5, 5]) == [5]
    assert PromptLookup(4, 3, min_ngram_size=3).propose(history) == []


def test_lists_of_drafters():
    lookup = PromptLookup()
    assert require_drafters(None) == ()
    assert require_drafters(lookup) == (lookup,)
    assert require_drafters([lookup, DraftModel("x.gguf")]) == (lookup, DraftModel("x.gguf"))
    with pytest.raises(ValueError, match="the list of drafters is empty; give at least one"):
        require_drafters([])
    with pytest.raises(ValueError, match="drafter must be"):
        require_drafters([lookup, 3])
