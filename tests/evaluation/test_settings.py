"""Settings: written forms, both ways, and errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyfly_cpp import AnyOf, Entropy, Exact, Margin, Window
from pyfly_cpp.drafters import DRAFTERS
from pyfly_cpp.evaluation.settings import EXACT, PLAIN, Setting, parse_setting, parse_settings, short_names


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("plain", PLAIN),
        ("exact", EXACT),
        ("exact k=4 lookup", Setting(draft_max=4, drafter="lookup")),
        ("margin:0.3 reconverge", Setting(Margin(0.3), Window(rule="reconverge"))),
        ("entropy:0.3 agree:4 k=12", Setting(Entropy(0.3), Window(4), 12)),
        ("entropy-normalized:0.3 window=2 tail=3", Setting(Entropy(0.3, top=None), Window(2, tail=3))),
        (
            "margin:1 reconverge:8 in-round draft",
            Setting(Margin(1), Window(8, "reconverge", across_rounds=False), None, "draft"),
        ),
        ("exact mtp k=2", Setting(draft_max=2, drafter="mtp")),
        ("exact eagle3:models/head.gguf", Setting(drafter="eagle3:models/head.gguf")),
        ('exact "draft:C:\\my models\\d.gguf" k=2', Setting(drafter="draft:C:\\my models\\d.gguf", draft_max=2)),
        ("margin:0.3 adaptive k=8", Setting(Margin(0.3), draft_max=8, adaptive=True)),
        ("margin:0.3 reconverge both", Setting(Margin(0.3), Window(rule="reconverge"), None, "both")),
        (
            "any(margin:0.3,entropy:0.5) across",
            Setting(AnyOf(Margin(0.3), Entropy(0.5)), Window(across_rounds=True)),
        ),
        ("margin:0.3 tail=2", Setting(Margin(0.3), Window(6, "reconverge", tail=2))),
        ("margin:0.3 agree", Setting(Margin(0.3), Window(6))),
    ],
)  # fmt: skip
def test_written_forms(text, setting):
    assert parse_setting(text) == setting
    assert parse_setting(str(setting)) == setting


settings = st.one_of(
    st.just(PLAIN),
    st.builds(
        Setting, st.just(Exact()), st.just(Window()), st.none() | st.integers(1, 64),
        st.sampled_from([None, "draft", "lookup", "both", "mtp", "eagle3:a b.gguf", "draft:it's.gguf"]), st.booleans(),
    ),
    st.builds(
        Setting, st.builds(Margin, st.floats(0, 10)) | st.builds(Entropy, st.floats(0, 10), st.integers(1, 32)),
        st.builds(Window, st.integers(0, 99), st.sampled_from(["agree", "reconverge"]), st.none() | st.integers(0, 9),
                  st.sampled_from([None, True, False])),
        st.none() | st.integers(1, 64), st.sampled_from([None, "draft", "lookup"]), st.booleans(),
    ),
)  # fmt: skip


@given(settings)
def test_every_setting_reads_back(setting):
    assert parse_setting(str(setting)) == setting


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
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
    ],
)
def test_errors(text, message):
    with pytest.raises(ValueError, match=message):
        parse_setting(text)


def test_each_setting_once():
    texts = ["exact", "margin:0.3", "margin:0.30", "margin:0.3 reconverge:6", "exact reconverge"]
    assert parse_settings(texts) == [PLAIN, EXACT, Setting(Margin(0.3))]


def test_the_window_that_is_the_gates_own_is_not_said():
    assert str(parse_setting("margin:0.3 reconverge")) == "margin:0.3"
    assert str(parse_setting("entropy:0.3 agree k=8")) == "entropy:0.3 k=8"
    assert str(parse_setting("entropy:0.3 reconverge")) == "entropy:0.3 reconverge:6"
    assert str(parse_setting("margin:0.3 window=2")) == "margin:0.3 reconverge:2"
    assert parse_setting("margin:0.3").window is None


def test_all_drafters_of_the_table_are_words():
    for word, kind in DRAFTERS.items():
        assert parse_setting(f"exact {word}").drafter == word
        if kind.takes_file:
            assert parse_setting(f"exact {word}:x.gguf").drafter == f"{word}:x.gguf"


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
