"""`Decoding`: its two written forms, both ways; what goes before what; errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from some_windows import some_windows

from pyfly_cpp import CrossVocabulary, DraftModel, Entropy, Exact, Margin, PromptLookup, Window
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding, parse_settings, short_names
from pyfly_cpp.decoding.drafters import DRAFTERS
from pyfly_cpp.decoding.gates import AnyOf


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("plain", PLAIN),
        ("exact", EXACT),
        ("exact k=4 lookup", Decoding(draft_max=4, drafter="lookup")),
        ("margin:0.3 reconverge", Decoding(Margin(0.3), Window(rule="reconverge"))),
        ("entropy:0.3 agree:4 k=12", Decoding(Entropy(0.3), Window(4), 12)),
        ("entropy-normalized:0.3 window=2 tail=3", Decoding(Entropy(0.3, top=None), Window(2, tail=3))),
        (
            "margin:1 reconverge:8 in-round draft",
            Decoding(Margin(1), Window(8, "reconverge", across_rounds=False), None, "draft"),
        ),
        ("exact mtp k=2", Decoding(draft_max=2, drafter="mtp")),
        ("exact eagle3:models/head.gguf", Decoding(drafter="eagle3:models/head.gguf")),
        ('exact "draft:C:\\my models\\d.gguf" k=2', Decoding(drafter="draft:C:\\my models\\d.gguf", draft_max=2)),
        ("margin:0.3 no-adaptive", Decoding(Margin(0.3), adaptive=False)),
        ("margin:0.3 adaptive k=8", Decoding(Margin(0.3), draft_max=8, adaptive=True)),
        ("margin:0.3 reconverge both", Decoding(Margin(0.3), Window(rule="reconverge"), None, "both")),
        (
            "any(margin:0.3,entropy:0.5) reconverge across",
            Decoding(AnyOf(Margin(0.3), Entropy(0.5)), Window(rule="reconverge", across_rounds=True)),
        ),
        ("margin:0.3 tail=2", Decoding(Margin(0.3), Window(0, tail=2))),
        ("margin:0.3 agree", Decoding(Margin(0.3), Window(6))),
    ],
)  # fmt: skip
def test_written_forms(text, setting):
    assert Decoding.parse(text) == setting.canonical()
    assert Decoding.parse(str(setting)) == setting.canonical()


WORDS = [
    None, "none", "draft", "lookup", "both", "both:d.gguf", "lookup+cross:d.gguf", "mtp", "eagle3:a b.gguf",
    "draft:it's.gguf",
]  # fmt: skip
DRAFTERS_GIVEN = [
    "auto", DraftModel("d.gguf", p_min=0.5), PromptLookup(texts=("src", "b")), CrossVocabulary(DraftModel("./d.gguf")),
    (PromptLookup(3, 7), CrossVocabulary(DraftModel("/d.gguf"))),
]  # fmt: skip


def decodings(drafters):
    gates = st.one_of(
        st.just(Exact()), st.builds(Margin, st.floats(0, 10)), st.builds(Entropy, st.floats(0, 10), st.integers(1, 32))
    )
    return st.builds(
        Decoding, gates, st.none() | some_windows(99, 9), st.none() | st.integers(0, 64), st.sampled_from(drafters),
        st.sampled_from([None, True, False]),
    )  # fmt: skip


@given(decodings(WORDS))
def test_every_setting_reads_back(d):
    assert Decoding.parse(str(d)) == d.canonical() == d.canonical().canonical()
    assert (d.canonical().is_plain, d.canonical().is_exact) == (d.is_plain, d.is_exact)
    assert d.is_exact or d.canonical().effective_window == d.effective_window


@given(decodings(WORDS + DRAFTERS_GIVEN))
def test_every_setting_is_kept_as_json(d):
    assert Decoding.from_dict(d.to_dict()) == Decoding.from_dict(json.loads(json.dumps(d.to_dict()))) == d


@given(decodings(WORDS), decodings(WORDS))
def test_what_is_given_goes_before_what_was_said(first, then):
    both = first.but(**vars(then))
    for name, value in vars(then).items():
        assert getattr(both, name) == (getattr(first, name) if value is None else value)
    assert first.but(gate="margin:1", window="agree:3", draft_max=0) == replace(
        first, gate=Margin(1), window=Window(3), draft_max=0
    ), "in its written form, too, and 0 is something"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"gat": "exact"}, "Did you mean 'gate'"),
        ({"gate": 3}, "'gate' must be a text"),
        ({"gate": "margn:1"}, "Did you mean 'margin'"),
        ({"window": 6}, "'window' must be an object"),
        ({"window": {"sise": 6}}, "Did you mean 'size'"),
        ({"draft_max": -1}, "draft_max must be an integer >= 0"),
        ({"draft_max": True}, "draft_max must be an integer >= 0"),
        ({"adaptive": "yes"}, "adaptive must be True, False or None"),
        ({"adaptive": 1}, "adaptive must be True, False or None"),
        ({"gate": "stochastic", "window": {"size": 3}}, "has no use for the window agree:3; leave it at None"),
        ({"drafter": []}, "'kind' must be one of draft"),
        ({"drafter": {"kind": "draft"}}, "needs 'model_path'"),
    ],
)
def test_errors_of_fields(data, message):
    with pytest.raises(ValueError, match=message) as caught:
        Decoding.from_dict(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("lookup", "starts with a gate, not with a drafter; write 'exact lookup'"),
        ("margn:0.3", "Did you mean 'margin'"),
        ("margin:0.3 reconverg", "Did you mean 'reconverge'"),
        ("margin:0.3 k=four", "whole number"),
        ("margin:0.3 k=-1", "whole number"),
        ("margin:0.3 reconverge:", "whole number"),
        ("exact k=0", "write plain"),
        ("plain k=4", "takes no 'k=4'"),
        ("margin:x", "cannot read the gate"),
        ("exact mtp9", "unknown word"),
        ("exact mpt", "Did you mean 'mtp'"),
        ("exact eagle3:", "write eagle3:FILE, or eagle3 alone"),
        ("exact lookup:x.gguf", "which takes no file"),
        ("exact 'draft:x y.gguf", "quote is not closed"),
        ("stochastic agree:3", "has no use for the window agree:3"),
    ],
)
def test_errors(text, message):
    with pytest.raises(ValueError, match=message):
        Decoding.parse(text)


def test_each_setting_once():
    texts = ["exact", "margin:0.3", "margin:0.30", "margin:0.3 agree:0", "exact reconverge"]
    assert parse_settings(texts) == [PLAIN, EXACT, Decoding(Margin(0.3))]


def test_the_window_that_is_the_gates_own_is_not_said():
    assert str(Decoding.parse("margin:0.3 agree:0")) == "margin:0.3"
    assert str(Decoding.parse("margin:0.3 reconverge")) == "margin:0.3 reconverge:6"
    assert str(Decoding.parse("entropy:0.3 agree k=8")) == "entropy:0.3 k=8"
    assert str(Decoding.parse("entropy:0.3 reconverge")) == "entropy:0.3 reconverge:6"
    assert str(Decoding.parse("margin:0.3 window=2")) == "margin:0.3 agree:2"
    assert Decoding.parse("margin:0.3").window is None


def test_all_drafters_of_the_table_are_words():
    for word, kind in DRAFTERS.items():
        assert Decoding.parse(f"exact {word}").drafter == word
        if kind.takes_file:
            assert Decoding.parse(f"exact {word}:x.gguf").drafter == f"{word}:x.gguf"


def test_short_names_are_without_folders_where_that_tells_files_apart():
    names = [
        "plain",
        "margin:0.3 k=2",
        "exact draft:/a/one.gguf",
        "exact draft:/b/one.gguf",
        'exact "cross:/a b/two x.gguf"',
    ]
    short = short_names(names)
    assert list(short) == names
    assert list(short.values()) == [*names[:4], "exact cross:two x.gguf"]
