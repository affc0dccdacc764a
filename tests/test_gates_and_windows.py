"""Configuration objects: ranges, written forms, equality."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_request import Engine
from some_windows import some_windows

from pyfly_cpp import DraftModel, Entropy, Exact, Fuzzy, Margin, PromptLookup, Stochastic, Window, verify
from pyfly_cpp._native import CallbackDrafter, ScriptedTarget
from pyfly_cpp.decoding.drafters import DRAFTERS, WORDS, options_of, require_drafters
from pyfly_cpp.decoding.gates import (
    FORMS,
    AllOf,
    AnyOf,
    ExactFirst,
    NoRepeat,
    Relaxed,
    Typical,
    at_thresholds,
    examples,
    parse_gate,
    require_gate,
    why_all,
    why_beyond,
    why_strict,
)
from pyfly_cpp.decoding.gates.fuzzy import KINDS
from pyfly_cpp.decoding.gates.guards import Guard
from pyfly_cpp.decoding.resolve import draft_max_of
from pyfly_cpp.decoding.windows import require_window


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("exact", Exact()),
        ("margin:0.3", Margin(0.3)),
        ("margin", Margin()),
        ("entropy:0.3", Entropy(0.3)),
        ("entropy:0.5:5", Entropy(0.5, top=5)),
        ("entropy-normalized:0.3", Entropy(0.3, top=None)),
        (" all(entropy:0.3,any(margin:0.5,exact)) ", AllOf(Entropy(0.3), AnyOf(Margin(0.5), Exact()))),
    ],
)
def test_written_forms(text, gate):
    assert parse_gate(text) == gate
    assert parse_gate(str(gate)) == gate
    assert hash(parse_gate(str(gate))) == hash(gate)


@pytest.mark.parametrize(
    "text",
    ["", "exac", "margin:", "margin:a", "margin:0.1:2", "entropy:0.3:0", "all()", "exact:1", "margin:-1", "margin:nan"],
)
def test_unreadable_gates(text):
    with pytest.raises(ValueError, match=r"gate|tau|theta|top"):
        parse_gate(text)


def test_a_window_under_agree_ends_with_its_step():
    for make in (
        lambda: Window(across_rounds=True),
        lambda: require_window("agree:6 across"),
        lambda: Window(6, "reconverge", across_rounds=True).but(rule="agree", across_rounds=True),
    ):
        with pytest.raises(ValueError, match=r"^a window under agree ends with its step; [^.]*reconverge[^.]*\.$"):
            make()
    assert Window(6, "reconverge", across_rounds=True).with_word("agree") == Window(6)


# Of the gates, windows and drafters that most use: end_to_end/test_bad_input.py.
@pytest.mark.parametrize(
    "make",
    [
        lambda: Margin(True),
        lambda: Entropy(0.3, top=33),
        lambda: Entropy(0.3, top=2.5),
        lambda: Typical(epsilon=math.nan),
        lambda: Typical(delta=1.5),
        lambda: Relaxed(0),
        lambda: Relaxed(33),
        lambda: Relaxed(2, -0.1),
        lambda: Fuzzy("jsd"),
        lambda: Fuzzy("js", -0.1),
        lambda: Fuzzy("js", math.nan),
        lambda: Fuzzy("tv", 0.1, top=0),
        lambda: ExactFirst(-1),
        lambda: ExactFirst(2.0),
        lambda: NoRepeat(0),
        lambda: AllOf(),
        lambda: AnyOf(3),
        lambda: Window(True),
        lambda: PromptLookup(max_ngram_size=2, min_ngram_size=3),
    ],
)
def test_out_of_range(make):
    with pytest.raises(ValueError, match=r"must|needs|gate"):
        make()


SWEPT = {
    "margin": (0.0, (0.075, 0.3, 1.2)), "entropy": (1.1, (0.6, 0.3, 0.0)),
    "entropy-normalized": (1.0, (0.3, 0.07, 0.0)),
    "typical": (None, (0.3, 0.09, 0.0)), "relaxed": (0.0, (0.02, 0.2, 1.0)), "fuzzy-js": (0.0, (0.05, 0.4, 0.7)),
    "fuzzy-tv": (0.0, (0.05, 0.4, 1.0)), "rfsd-js": (0.0, (0.05, 0.4, 0.7)),
}  # fmt: skip
"""Words of gates: the threshold that accepts as exact matching does, if one does, and others from strict to loose."""


@pytest.mark.parametrize("word", SWEPT)
def test_thresholds_loosen(word):
    exact, loose = SWEPT[word]
    gates = at_thresholds(word, loose if exact is None else (exact, *loose))
    rng = np.random.default_rng(3)
    rows = rng.normal(scale=2, size=(401, 10)).astype(np.float32)
    drafts = (rows[:400] + rng.normal(scale=1, size=(400, 10))).astype(np.float32)
    draft = (rows[:400].argmax(axis=1) + rng.integers(1, 10, 400)) % 10

    def n_loose(gate):
        window = None if gate.draws else Window(0)
        return [d.reason for d in verify(rows, draft, gate, window, draft_logits=drafts).decisions].count("loose")

    counts = [n_loose(gate) for gate in gates]
    assert [parse_gate(str(gate)) for gate in gates] == gates
    assert counts == sorted(counts) and counts[-1] > 20 and (exact is None or counts[0] == 0)
    if word.endswith(("-js", "-tv")):
        assert [why_all(gate, 8) is None for gate in gates] == [True] * (len(gates) - 1) + [False]


@pytest.mark.parametrize(
    ("word", "hint"), [("margn", "Did you mean 'margin'"), ("exact-first", "gate with a threshold"), ("all", "typical")]
)
def test_gates_without_a_threshold(word, hint):
    with pytest.raises(ValueError, match=hint):
        at_thresholds(word, [0.3])


def test_defaults_of_across_rounds():
    assert not Window().outlives_step
    assert Window(rule="reconverge").outlives_step
    assert not Window(across_rounds=False).outlives_step
    assert not Window(rule="reconverge", across_rounds=False).outlives_step


gates = st.recursive(
    st.one_of(
        st.just(Exact()),
        st.builds(Margin, st.floats(0, 3)),
        st.builds(Entropy, st.floats(0, 1), st.none() | st.integers(1, 4)),
        st.builds(Typical, st.floats(0, 1), st.floats(0, 1)),
        st.builds(Relaxed, st.integers(1, 32), st.floats(0, 1)),
        st.builds(Fuzzy, st.sampled_from(KINDS), st.floats(0, 2), st.none() | st.integers(1, 99)),
        st.builds(lambda n, m: AllOf(Exact(), ExactFirst(n), NoRepeat(m)), st.integers(0, 99), st.integers(1, 99)),
    ),
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(lambda g: st.sampled_from([AllOf(*g), AnyOf(*g)])),
    max_leaves=6,
)
windows = some_windows(9, 9)


alone = st.one_of(
    st.just(Stochastic()),
    st.builds(Fuzzy, st.sampled_from(KINDS), st.floats(0, 2), st.none() | st.integers(1, 99), st.just(True)),
)


@given(gates | alone)
def test_every_gate_reads_back(gate):
    assert parse_gate(str(gate)) == gate


@given(gates, windows)
def test_every_window_reads_back_onto_a_gates_own(gate, window):
    read = gate.window
    for word in str(window).split():
        read = read.with_word(word)
    assert read == window


def test_a_rule_for_a_gate_without_a_window():
    assert Typical().window == Window(0)
    assert Typical().window.with_word("reconverge") == Window(6, "reconverge")
    assert Typical().window.with_word("agree:0") == Window(0)
    assert Margin(0.3).window.with_word("agree") == Window(6, "agree")


def test_the_table_of_forms():
    for form in FORMS:
        if issubclass(form.gate, Guard):
            assert form.example not in examples()
            gate = parse_gate(f"all(exact,{form.example})")
            assert isinstance(gate.gates[1], form.gate) and gate.window == Window()
            for alone in (form.example, f"all({form.example})"):
                with pytest.raises(ValueError, match=r"only restricts other gates.* as in all\(margin:0.3,"):
                    parse_gate(alone)
            with pytest.raises(ValueError, match="not in an any"):
                parse_gate(f"any(exact,{form.example})")
            continue
        example = form.example or ":".join([form.word, "0.5", "9"][: 1 + len(form.numbers)])
        example = example.replace("...", "margin")
        gate = parse_gate(example)
        assert isinstance(gate, form.gate) and str(gate) == example.replace("margin,margin", "margin:0.3,margin:0.3")
        if form.numbers is not None:
            assert form.example in examples(combined=False)
            assert all(hasattr(form.gate, field) for field in form.numbers)
    with pytest.raises(ValueError, match=r"Exact\(\), Margin\(.* or AnyOf\(\.\.\.\), not 3"):
        require_gate(3)


@pytest.mark.parametrize(
    ("gate", "window"),
    [
        ("exact", Window(6)),
        ("margin:0.3", Window(0)),
        ("entropy:0.3", Window(6)),
        ("entropy-normalized:0.3", Window(6)),
        ("all(entropy:0.3,margin:0.5)", Window(0)),
        ("any(entropy:0.3,margin:0.5)", Window(6)),
        ("any(margin:0.3,margin:0.5)", Window(0)),
        ("any(exact,margin:0.5)", Window(0)),
        ("all(exact,margin:0.5)", Window(0)),
        ("any(all(entropy:0.3,margin:0.5),margin:1)", Window(0)),
        ("any(exact,exact)", Window(6)),
    ],
)
def test_a_gate_brings_its_window(gate, window):
    assert parse_gate(gate).window == window


@given(gates)
def test_a_lossless_gate_never_defers(gate):
    """Of the most undecided row, with the draft second by a hair; a gate that is not lossless may still be strict."""
    row = np.zeros((2, 4))
    row[:, 1] = 1e-3
    decisions = verify(row, [0], gate=gate, window=Window(0), draft_logits=row[:1]).decisions
    assert not (decisions[0].reason == "loose" and gate.is_lossless)


@given(windows.filter(lambda window: not window.outlives_step), st.integers(1, 12))
def test_what_can_never_be_accepted_is_known(window, k):
    """A step in the window's favour: the first draft is a mismatch that is deferred, all others match."""
    rows = np.zeros((k + 1, 4))
    rows[:, 1] = 1.0
    decisions = verify(rows, [0] + [1] * (k - 1), gate=Entropy(0.0), window=window).decisions
    why = why_strict(Entropy(0.0), window, k)
    assert (decisions[0].reason == "loose") == (why is None) == (window.n_strict < k)
    assert why is None or decisions[0].reason == "boundary"


@given(windows.filter(lambda window: window.outlives_step), st.integers(1, 12))
def test_what_outlives_its_step_is_held_back_by_its_tail_alone(window, k):
    def row(history):
        return np.array([0.0, 1.0, 0.0, 0.0], dtype=np.float32)

    def draft(history):
        return [0 if len(history) == 1 else 1] + [1] * (k - 1)

    with ScriptedTarget(row, 4) as target, Engine(target) as engine:
        gate = Entropy(0.0)
        engine.configure(gate, window, [(CallbackDrafter(draft), k)])
        engine.begin([1])
        while engine.counters()["committed"] < 12:
            engine.step()
        assert engine.counters()["loose_accepted"] == (why_strict(gate, window, k) is None)


def test_why_nothing_is_accepted():
    why = why_strict(Margin(0.3), Window(6), 3)
    for named in ("margin:0.3", "agree:6", "last 6 positions", "at most 3 drafts", "7 tokens", "reconverge:6"):
        assert why is not None and named in why
    assert "or lower the window's tail to 2." in (why_strict(Margin(0.3), Window(2, "reconverge", tail=4), 3) or "")
    for gate in (Exact(), AllOf(Exact(), Margin())):
        assert why_strict(gate, Window(6), 3) is None
    assert why_strict(Margin(0.3), Window(6), 0) is None, "nothing is drafted"
    assert why_strict(Margin(0.3), Window(2), 3) is None, "vLLM's"


@pytest.mark.parametrize("written", ["fuzzy-js:0.7", "fuzzy-tv:1", "rfsd-js:1.5", "all(fuzzy-js:0.7:5,exact-first:2)"])
def test_a_threshold_that_lets_everything_pass_is_known(written):
    gate = parse_gate(written)
    if not gate.draws:  # rows that are as different as they can be
        row, other = np.array([[9.0, -9.0], [0, 0]]), np.array([[-9.0, 9.0]])
        decisions = verify(row, [1], gate, Window(0), draft_logits=other).decisions
        assert decisions[0].reason == "loose" or "exact-first" in written
    why = why_all(gate, 4)
    assert why is not None and written in why
    assert ("fuzzy-js-code:" in why) == ("js" in written)
    assert why_all(gate, 0) is None, "nothing is drafted"


@pytest.mark.parametrize("written", ["fuzzy-js:0.69", "fuzzy-tv:0.99", "fuzzy-js-code:1.5", "fuzzy-kl:9", "margin:9"])
def test_thresholds_that_may_be_meant(written):
    assert why_all(parse_gate(written), 4) is None


def test_a_margin_larger_than_advised_is_known():
    for written in ("margin:0.3", "all(margin:1,exact-first:2)", "entropy:2", "exact"):
        assert why_beyond(parse_gate(written), 4) is None
    why = why_beyond(Margin(1.0), 4)
    assert why is not None and "margin:1 " in why and "37%" in why and "0.3" in why
    assert why_beyond(Margin(1.0), 0) is None, "nothing is drafted"


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


def test_drafters_and_windows_in_their_written_form():
    assert require_drafters("lookup") == (PromptLookup(),) and require_drafters("none") == ()
    assert require_drafters(["lookup", "draft:x.gguf"]) == (PromptLookup(), DraftModel("x.gguf"))
    assert require_drafters("both:x.gguf") == (PromptLookup(), DraftModel("x.gguf"))
    for text, message in (
        ("lokup", "Did you mean 'lookup'"), ("x.gguf", "Did you mean 'draft:x.gguf'"),
        ("multi", "unknown drafter 'multi'. A drafter is written auto, draft, lookup"),
        ("draft", "needs a file; write draft:FILE"), ("lookup:x", "'lookup:x' .* takes no file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            require_drafters(text)
    windows = (Window(), Window(3, "reconverge"), Window(5, tail=6), Window(2, "reconverge", across_rounds=False))
    assert [require_window(str(window)) for window in windows] == list(windows)
    assert require_window("reconverge") == Window(rule="reconverge") and require_window(None) is None
    for text in ("", "6", "tail=2", "agree:x", "agree:2 reconverge:3", "agre:2"):
        with pytest.raises(ValueError, match=r"window|whole number"):
            require_window(text)


def test_the_table_of_drafters():
    """What the command line sets are fields; what a word says can be made."""
    assert list(WORDS)[: len(DRAFTERS) + 1] == [*DRAFTERS, "both"]
    assert all(WORDS[f"lookup+{word}"] == (PromptLookup, kind) for word, kind in DRAFTERS.items() if word != "lookup")
    assert "lookup+lookup" not in WORDS and WORDS["lookup+draft"] == WORDS["both"]
    for word, kind in DRAFTERS.items():
        made = kind.make("x.gguf")
        parts = [made, *filter(dataclasses.is_dataclass, vars(made).values())]
        fields = {field.name for part in parts for field in dataclasses.fields(part)}
        assert kind.word == word and {option.field for option in kind.options} <= fields
        assert kind.takes_file == (kind.file_field in fields) >= kind.needs_file
        given = {option.field: option.default for option in kind.options}
        drafter = kind.make("x.gguf", **given)
        assert isinstance(drafter, kind) and draft_max_of(drafter, None) >= 1 and not drafter.in_target
        assert require_drafters(drafter) == (drafter,) and str(drafter)
    assert len({option.name for option in options_of(DRAFTERS.values())}) == len(options_of(DRAFTERS.values()))
    assert PromptLookup.make(max_ngram_size=1, min_ngram_size=2, draft_max=3) == PromptLookup(1, min_ngram_size=1)


# ---- Rows of models that hide tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate",
    [
        *("exact", "margin:0.3", "entropy:0.3", "entropy-normalized:0.3", "typical:0.09:0.3"),
        *("relaxed:10:0.6", "all(margin:0.3,no-repeat:2)", *(f"fuzzy-{kind}:0.1" for kind in KINDS)),
    ],
)
def test_logits_of_minus_the_largest_float_are_those_of_hidden_tokens(gate):
    """Some graphs of llama.cpp hide tokens so: the measures are finite, and what is decided is what it is without."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 40), scale=1.5).astype(np.float32)
    drafted = rows[:4] + rng.normal(size=(4, 40), scale=0.2).astype(np.float32)
    hidden = np.arange(4, 20)

    def judged(logit):
        for logits in (rows, drafted):
            logits[:, hidden] = logit
        runners_up = rows[:4].argsort(axis=1)[:, -2]
        draft = [*runners_up[:3], hidden[0]]
        return verify(rows, draft, require_gate(gate), Window(0), draft_logits=drafted).decisions

    found, expected = judged(-np.finfo(np.float32).max), judged(-1e4)
    assert [decision.reason for decision in found] == [decision.reason for decision in expected]
    assert all(math.isfinite(decision.entropy) and math.isfinite(decision.margin) for decision in found)
    assert [d.entropy for d in found] == pytest.approx([d.entropy for d in expected], abs=1e-5)
