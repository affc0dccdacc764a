"""`verify` against a short NumPy oracle, on random steps with infinities, ties and every gate and window."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from some_windows import some_windows

from pyfly_cpp import Entropy, Exact, Fuzzy, Margin, Window, verify
from pyfly_cpp.decoding.gates import AllOf, AnyOf, ExactFirst, NoRepeat, Relaxed, Typical
from pyfly_cpp.decoding.gates.fuzzy import KINDS
from pyfly_cpp.errors import NotFiniteError

IMPOSSIBLE = 22.18
"""Nats of margin from which on no gate accepts a token."""


def log_softmax(row):
    row = row.astype(np.float64) - row.max()
    return row - np.log(np.exp(row).sum())


def far(value, limit):
    return math.inf if value == limit == 0.0 else abs(value - limit) / max(abs(limit), 1e-3)


def divergence(gate, lp, lq):
    if gate.top is not None and gate.top < lp.size:
        order = np.argsort(-lp, kind="stable")
        rest = [np.log(np.exp(x[order[gate.top :]]).sum()) for x in (lp, lq)]
        lp, lq = (np.append(x[order[: gate.top]], r) for x, r in zip((lp, lq), rest))
    p, q = np.exp(lp), np.exp(lq)
    lm = np.log((p + q) / 2, where=p + q > 0, out=np.full_like(p, -np.inf))

    def kl(la, lb):
        a = np.exp(la)
        return float(np.where(a > 0, a * (np.where(a > 0, la, 0) - np.where(a > 0, lb, 0)), 0).sum())

    return {
        "kl": lambda: kl(lq, lp),
        "kl-target": lambda: kl(lp, lq),
        "js": lambda: (kl(lp, lm) + kl(lq, lm)) / 2,
        "js-code": lambda: (kl(lm, lp) + kl(lm, lq)) / 2,
        "tv": lambda: float(np.abs(p - q).sum() / 2),
    }[gate.kind]()


def measure(gate, lp, draft, answered=(), lq=None):
    """The gate's verdict and how far it is from flipping (nats or, normalised, a share)."""
    p = np.exp(lp)
    terms = np.where(p > 0, -p * np.where(p > 0, lp, 0), 0)
    margin = lp.max() - lp[draft]
    if isinstance(gate, Exact):
        return False, math.inf
    if isinstance(gate, Margin):
        return margin < gate.tau, abs(margin - gate.tau)
    if isinstance(gate, Typical):
        least = min(gate.epsilon, gate.delta * math.exp(-terms.sum()))
        return p[draft] > least, far(p[draft], least)
    if isinstance(gate, Relaxed):
        is_near = draft in np.argsort(-lp, kind="stable")[: gate.k]
        return is_near and p.max() - p[draft] <= gate.delta, far(p.max() - p[draft], gate.delta)
    if isinstance(gate, Fuzzy):
        value = divergence(gate, lp, lq)
        return value <= gate.threshold, far(value, gate.threshold)
    if isinstance(gate, ExactFirst):
        return len(answered) >= gate.n, math.inf
    if isinstance(gate, NoRepeat):
        text = (*answered, draft)
        grams = [text[i : i + gate.n] for i in range(len(text) - gate.n + 1)]
        return grams[-1:] not in [[gram] for gram in grams[:-1]], math.inf
    if isinstance(gate, Entropy):
        h = terms.sum() / math.log(max(p.size, 2)) if gate.top is None else terms[np.argsort(-p)[: gate.top]].sum()
        return h >= gate.theta, abs(h - gate.theta)
    verdicts = [measure(g, lp, draft, answered, lq) for g in gate.gates]
    combine = all if isinstance(gate, AllOf) else any
    return combine(v for v, _ in verdicts), min(d for _, d in verdicts)


def oracle(rows, draft, gate, window, protected, answered=(), draft_rows=None, eog=()):
    """Reasons of all positions, each judged on its own; None where float32 and float64 may disagree."""
    k, tokens = len(draft), rows.argmax(axis=1)
    gated = []
    for i, d in enumerate(draft):
        lp = log_softmax(rows[i])
        before = (*answered, *draft[:i])
        defers, slack = measure(gate, lp, d, before, log_softmax(draft_rows[i]))
        margin = lp.max() - lp[d]
        if slack < 1e-4 or abs(margin - IMPOSSIBLE) < 1e-4:
            return None
        forbidden = d in protected or tokens[i] in protected or np.isneginf(lp[d])
        unsafe = forbidden or (defers and margin > IMPOSSIBLE)
        gated.append("match" if d == tokens[i] else "safety" if unsafe else "loose" if defers else "gate")
    agree = window.rule == "agree"
    needed = max(window.tail or 0, window.size if agree else min(window.size, 1))
    fits = [k - 1 - i >= needed for i in range(k)]
    out = list(gated)
    for i, reason in enumerate(gated):
        if reason != "loose":
            continue
        ahead = gated[i + 1 : i + 1 + window.size]
        if not fits[i]:
            out[i] = "boundary"
        elif window.size == 0:
            out[i] = "loose"
        elif agree:
            end = next((n for n, d in enumerate(draft[i + 1 : i + window.size]) if d in eog), None)
            holds = all(a == "match" for a in ahead[: None if end is None else end + 1])
            out[i] = "window" if not holds else "loose" if end is None else "boundary"  # the text ends before it does
        else:
            out[i] = "window" if len(ahead) == window.size else "boundary"
            for n, a in enumerate(ahead):
                if a == "match":
                    out[i] = "loose"
                    break
                if a != "loose" or not fits[i + 1 + n]:  # a rejection ends the step
                    out[i] = "window" if n + 1 == window.size else "boundary"
                    break
    return out


UNREPEATED = AllOf(Margin(), NoRepeat())
OUTLIVING = Window(rule="reconverge", across_rounds=True)
gates = st.recursive(
    st.one_of(
        st.just(Exact()),
        st.floats(0, 2).map(Margin),
        st.tuples(st.floats(0, 1.2), st.integers(1, 8)).map(lambda a: Entropy(a[0], top=a[1])),
        st.floats(0, 1).map(lambda t: Entropy(t, top=None)),
        st.builds(Typical, st.floats(0, 1), st.floats(0, 1)),
        st.builds(Relaxed, st.integers(1, 32), st.floats(0, 1)),
        st.builds(Fuzzy, st.sampled_from(KINDS), st.floats(0, 2), st.none() | st.integers(1, 40)),
    ),
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(lambda g: st.sampled_from([AllOf(*g), AnyOf(*g)])),
    max_leaves=4,
)
guards = st.integers(0, 12).map(ExactFirst) | st.integers(1, 4).map(NoRepeat)
gates = gates | st.builds(lambda gate, guard: AllOf(gate, *guard), gates, st.lists(guards, min_size=1, max_size=2))
windows = some_windows(7, 9, across=[False])


@settings(max_examples=400, deadline=None)
@example(Fuzzy("js-code", 1.0), Window(0, across_rounds=False), 2, 6, 0)  # tokens that both rows forbid
@given(gates, windows, st.integers(0, 12), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_verify_equals_the_oracle(gate, window, k, v, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(scale=rng.choice([0.3, 1.0, 4.0]), size=(k + 1, v)).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = -np.inf
    rows[rng.random(rows.shape) < 0.1] -= rng.choice([20, 25, 100])  # a logit bias
    rows[np.arange(k + 1), rng.integers(0, v, k + 1)] = 1.0
    # Half of the drafts match, so that windows hold now and then.
    draft = np.where(rng.random(k) < 0.6, rows[:k].argmax(axis=1), rng.integers(0, v, k))
    protected, eog = (frozenset(rng.integers(0, v, rng.integers(0, 3)).tolist()) for _ in range(2))
    answered = rng.integers(0, min(v, 4), rng.integers(0, 9)).tolist()
    draft_rows = (rows[:k] + rng.normal(scale=rng.choice([0.1, 1.0]), size=(k, v))).astype(np.float32)
    expected = oracle(rows, draft, gate, window, protected | eog, answered, draft_rows, eog)
    result = verify(rows, draft, gate, window, protected, draft_logits=draft_rows, answered=answered, eog=eog)
    if expected is None:
        return
    assert [d.reason for d in result.decisions] == expected
    n = next((i for i, r in enumerate(expected) if r not in ("match", "loose")), k)
    end = next((i + 1 for i, token in enumerate(draft[:n]) if token in eog), None)
    assert result.n_accepted == (end or n)
    assert result.tokens == (draft[:end].tolist() if end else [*draft[:n].tolist(), int(rows[n].argmax())])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([np.nan, np.inf, None]))
def test_rows_without_a_distribution_are_errors(v, seed, bad):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(2, v)).astype(np.float32)
    if bad is None:
        rows[0] = -np.inf
    else:
        rows[0, rng.integers(0, v)] = bad
    with pytest.raises(NotFiniteError, match="no distribution"):
        verify(rows, [0])


@pytest.mark.parametrize("mask", [-700.0, -760.0, -1e4, -1e9, -np.inf])
def test_probabilities_that_underflow_say_nothing(mask):
    """A finite mask is as good as -inf: rows that are otherwise alike stay alike for every kind."""
    p = np.array([1.0, 0.9, 0, 0, 0, mask, 0, 0], np.float32)
    q = np.array([0.9, 1.0, 0, 0, 0, mask, 0, 0], np.float32)
    for kind in KINDS:
        found = verify([p, p], [1], draft_logits=[q], gate=Fuzzy(kind, 0.3), window=Window(0))
        assert found.decisions[0].accepted, kind


@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
@pytest.mark.parametrize("gate", [Fuzzy("js", 0.1), Fuzzy("js", 0.1, top=2)], ids=str)
def test_draft_rows_without_a_distribution_are_errors(bad, gate):
    rows = np.zeros((2, 5), dtype=np.float32)
    draft_rows = np.full((1, 5), -np.inf) if bad is None else np.array([[0, 0, bad, 0, 0]])
    for draft in (0, 1):  # a match, a mismatch
        with pytest.raises(NotFiniteError, match="draft_logits row 0 has no distribution"):
            verify(rows, [draft], gate, draft_logits=draft_rows)
        verify(rows, [draft], Margin(0.1), draft_logits=draft_rows)  # nobody looks at them


def test_what_is_no_repeat():
    """Tokens of the step itself count, as the draft has them, and n-grams that overlap."""
    gate, window = AllOf(Margin(9.0), NoRepeat(3)), Window(0)
    rows = np.zeros((3, 6), dtype=np.float32)
    rows[:, 5] = 1.0  # the target's choice everywhere

    def reasons(draft, answered):
        return [d.reason for d in verify(rows, draft, gate, window, answered=answered).decisions]

    assert reasons([3, 4], [1, 2, 3, 0, 1, 2]) == ["gate", "loose"]
    assert reasons([3, 1], [1, 2, 3, 1, 2]) == ["gate", "gate"]  # 2 3 1, too
    assert reasons([2, 2], [2, 2]) == ["loose", "gate"]
    assert reasons([2, 2], [3, 2]) == ["loose", "loose"]
    assert reasons([5, 5], [5, 5, 5]) == ["match", "match"]  # what the target repeats stands
    assert reasons([3, 3], []) == ["loose", "loose"]


def test_target_tokens_replace_the_argmax():
    rows = np.array([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]], dtype=np.float32)
    assert verify(rows, [2], target_tokens=[2, 1]).tokens == [2, 1]
    assert verify(rows, [1], target_tokens=[2, 1]).tokens == [2]


def test_a_window_may_be_written():
    rows = np.zeros((3, 4), dtype=np.float32)
    assert verify(rows, [1, 2], "margin:0.3", "agree:1") == verify(rows, [1, 2], Margin(0.3), Window(1))


def test_a_draft_token_that_is_the_favourite_has_margin_zero():
    rows = np.array([[0.0, 1.0, 0.5], [2.0, 0.0, 0.0]], dtype=np.float32)
    decision = verify(rows, [1], gate=Margin(0.1), window=Window(0), target_tokens=[2, 0]).decisions[0]
    assert (decision.margin, decision.reason) == (0.0, "loose")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": np.zeros((1, 3)), "draft": [], "n_answered": -1}, "n_answered must be an integer >= 0"),
        ({"logits": np.zeros((1, 3)), "draft": [], "n_answered": 1.5}, "n_answered must be an integer >= 0"),
        ({"logits": np.zeros((1, 3)), "draft": [], "n_answered": 2**64 - 1}, "n_answered must be an integer >= 0"),
        ({"logits": np.zeros((1, 3)), "draft": [], "window": 6}, "window must be Window"),
        ({"logits": np.zeros((1, 3)), "draft": [], "answered": [3]}, "answered token 3 is outside the vocabulary of 3"),
        ({"logits": np.zeros((1, 3)), "draft": [], "answered": 3}, "answered must be a one-dim"),
        ({"logits": np.zeros((2, 3)), "draft": [1], "n_answered": 1, "gate": UNREPEATED}, "give answered"),
        ({"logits": np.zeros((1, 3)), "draft": [], "gate": NoRepeat()}, r"only restricts.*all\(margin:0.3,no-r"),
        ({"logits": np.zeros((2, 3)), "draft": [0, 1]}, r"logits must have shape \[3, \*\]"),
        ({"logits": np.zeros(3), "draft": []}, "must have shape"),
        ({"logits": np.zeros((2, 3)), "draft": [3]}, "draft token 3 is outside the vocabulary of 3"),
        ({"logits": np.zeros((2, 3)), "draft": [-1]}, "draft token -1 is outside"),
        ({"logits": np.zeros((2, 3)), "draft": [0.5]}, "sequence of token ids"),
        ({"logits": np.zeros((2, 3)), "draft": [0], "target_tokens": [0]}, "target_tokens must hold 2 tokens"),
        ({"logits": np.zeros((2, 3)), "draft": [0], "protected": {7}}, "protected token 7"),
        ({"logits": np.zeros((2, 3)), "draft": [0], "eog": {7}}, "end token 7"),
        ({"logits": np.array([["a"]]), "draft": []}, "array of numbers"),
        ({"logits": np.zeros((2, 3)), "draft": [0], "window": OUTLIVING}, "one step"),
        ({"logits": np.zeros((2, 3)), "draft": [0], "gate": "margn:0.3"}, "Did you mean 'margin'"),
        ({"logits": np.zeros((2, 3)), "draft": [0], "draft_logits": np.zeros((2, 3))}, r"shape \[1, 3\]"),
        ({"logits": np.zeros((2, 3)), "draft": [0], "gate": Fuzzy("js", 0.1)}, "give draft_logits"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        verify(**arguments)
