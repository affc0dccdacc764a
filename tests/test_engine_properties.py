"""The step loop on a scripted target and drafter, against an oracle that may look at the whole future."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from one_request import Engine
from some_windows import some_windows

from pyfly_cpp import ContextFullError, Entropy, Exact, Fuzzy, Margin, Window, verify
from pyfly_cpp._native import CallbackDrafter, ScriptedTarget
from pyfly_cpp.decoding.gates import AllOf, ExactFirst, NoRepeat
from pyfly_cpp.errors import NotFiniteError

N_VOCAB, EOG, PROTECTED = 9, 0, 1
PROMPT = [2, 3, 4]


class Script:
    """A model and a drafter that are functions of the last few tokens."""

    def __init__(self, seed, agreement, eog_bias):
        self.seed, self.agreement, self.eog_bias = seed, agreement, eog_bias

    def row(self, history):
        key = [self.seed, *(int(t) for t in history[-3:])]
        row = np.random.default_rng(key).normal(scale=1.0, size=N_VOCAB).astype(np.float32)
        row[EOG] += self.eog_bias
        return row

    def choice(self, history):
        return int(self.row(history).argmax())

    def draft_row(self, history):
        return self.row(history) + 0.7 * np.roll(self.row(history), 1)

    def draft_rows(self, history, tokens):
        text, rows = [int(t) for t in history], []
        for token in tokens:
            rows.append(self.draft_row(text))
            text.append(token)
        return np.array(rows, dtype=np.float32).reshape(-1, N_VOCAB)

    def draft(self, history, k):
        """Up to k tokens: often the target's choice, often its second, sometimes anything."""
        rng = np.random.default_rng([self.seed, 77, *(int(t) for t in history[-4:])])
        out, text = [], list(history)
        for _ in range(rng.integers(0, k + 1)):
            row, u = self.row(text), rng.random()
            order = np.argsort(-row)
            token = order[0] if u < self.agreement else order[1] if u < 0.9 else rng.integers(0, N_VOCAB)
            out.append(int(token))
            text.append(int(token))
        return out


class Oracle:
    """Decides every deferred mismatch by simulating what comes after it if it stands."""

    def __init__(self, script, tau, window, k, n_ctx, falls_back=False, n_exact=0, n_gram=None):
        self.script, self.tau, self.window, self.k, self.n_ctx = script, tau, window, k, n_ctx
        self.n_exact, self.n_gram = n_exact, n_gram
        self.outlives_step = window.outlives_step and not falls_back

    def passes(self, text, token):
        row = self.script.row(text)
        return row.max() - row[token] < self.tau

    def defers(self, text, token, choice, n_left):
        if {token, choice} & {EOG, PROTECTED} or not self.passes(text, token):
            return False
        answer, n = [*text[len(PROMPT) :], token], self.n_gram
        if len(answer) <= self.n_exact or (n and answer[-n:] in [answer[i : i + n] for i in range(len(answer) - n)]):
            return False
        w = self.window
        needed = 0 if w.outlives_step else (w.size if w.rule == "agree" else min(w.size, 1))
        return n_left >= max(needed, w.tail or 0)

    def propose(self, text):
        k = min(self.k, self.n_ctx - len(text))
        return self.script.draft(text, self.k)[:k] if k > 0 else []

    def stands(self, text, rest):
        """Whether the mismatch whose draft token ends `text` stands; `rest` is the step's draft behind it."""
        w, text, rest, n = self.window, list(text), list(rest), 0
        while n < w.size:
            if len(text) > self.n_ctx:
                return False  # the context ends before the window does
            choice = self.script.choice(text)
            n += 1
            if not rest:  # the target's own token; then the next step, unless the text ends
                if choice == EOG or not self.outlives_step:
                    return False
                text.append(choice)
                rest = None
            else:
                token, rest = rest[0], rest[1:]
                if token == choice:
                    if choice == EOG or w.rule == "reconverge":
                        return w.rule == "reconverge" or n == w.size
                    text.append(token)
                    continue
                if choice == EOG or w.rule == "agree":
                    return False
                if self.defers(text, token, choice, len(rest)):
                    text.append(token)
                    continue
                if not self.outlives_step:
                    return False
                text.append(choice)
                rest = None
            if rest is None:
                rest = self.propose(text) if len(text) <= self.n_ctx else []
                if not rest:
                    return False  # nothing could match
        return w.rule == "agree"

    def run(self, n_tokens, prompt=PROMPT):
        text, out = list(prompt), []
        while len(out) < n_tokens and len(text) <= self.n_ctx:
            draft = self.propose(text)
            for i in range(len(draft) + 1):
                choice = self.script.choice(text)
                token = draft[i] if i < len(draft) else choice
                if token != choice:
                    keeps = self.defers(text, token, choice, len(draft) - 1 - i)
                    if keeps and self.window.size:
                        keeps = self.stands([*text, token], draft[i + 1 :])
                    if not keeps:
                        token = choice
                text.append(token)
                out.append(token)
                if token == EOG:
                    return out
                if i == len(draft) or token != draft[i]:
                    break
        return out


class FuzzyOracle(Oracle):
    """Defers by the total variation of the two rows."""

    def passes(self, text, token):
        rows = self.script.row(text), self.script.draft_row(text)
        p, q = (np.exp(row - row.max(), dtype=np.float64) for row in rows)
        return np.abs(p / p.sum() - q / q.sum()).sum() / 2 <= self.tau


def run_engine(script, gate, window, k, n_tokens, n_ctx=4096, n_batch=64, draft_max=None, limit=None, park=()):
    """Committed tokens up to EOG; checks on the way that positions never go back. `limit`: of a
    recurrent memory; `park`: after which steps the memory is to hold the committed tokens but the last."""
    with ScriptedTarget(script.row, N_VOCAB, n_ctx, n_batch, recurrent=limit) as target:
        target.protect([PROTECTED], [EOG])

        def draft(history):
            tokens = script.draft(history, k)
            return tokens, script.draft_rows(history, tokens)

        with CallbackDrafter(draft, N_VOCAB) as drafter, Engine(target) as engine:
            engine.configure(gate, window, [(drafter, k if draft_max is None else draft_max)])
            engine.begin(PROMPT)
            while engine.prefill():
                pass
            out = []
            while len(out) < n_tokens and EOG not in out:
                try:
                    engine.step()
                except ContextFullError:
                    break
                for position, token in engine.tokens():
                    assert position == len(PROMPT) + len(out)
                    out.append(token)
                assert engine.history()[: len(PROMPT) + len(out)].tolist() == PROMPT + out
                assert engine.n_evaluated <= len(engine.history()) - 1
                if limit is None:
                    assert engine.n_evaluated == len(engine.history()) - 1
                if len(out) and engine.counters()["steps"] in park:
                    engine.park(len(PROMPT) + len(out) - 1)
                    assert engine.n_evaluated == len(PROMPT) + len(out) - 1
            counters = engine.counters()
            assert counters["committed"] >= len(out)
            assert counters["matched"] + counters["loose_accepted"] <= counters["drafted"]
            assert limit is not None or counters["replayed"] == 0
            engine.end(len(PROMPT) + len(out) - 1)
            if out:
                assert engine.n_evaluated == len(PROMPT) + len(out) - 1
            return out[: out.index(EOG) + 1] if EOG in out else out


def require_same(engine, oracle, n):
    """The engine committed what the oracle did, as far as both went, and n tokens where the oracle has as many."""
    m = min(len(engine), len(oracle))
    assert m >= min(n, len(oracle))
    assert engine[:m] == oracle[:m]


scripts = st.builds(
    Script, st.integers(0, 2**31), st.sampled_from([0.2, 0.5, 0.8, 1.0]), st.sampled_from([-9.0, -1.0, 0.0])
)
windows = some_windows(8, 5)


def require_oracle(script, gate, tau, window, k, n=25, kind=Oracle, **more):
    expected = kind(script, tau, window, k, 4096, **more).run(n)
    require_same(run_engine(script, gate, window, k, n), expected, n)


@settings(max_examples=400, deadline=None)
@given(scripts, st.sampled_from([0.0, 0.3, 1.0, 5.0]), windows, st.integers(0, 10))
def test_commits_what_the_oracle_commits(script, tau, window, k):
    require_oracle(script, Margin(tau), tau, window, k)


@settings(max_examples=100, deadline=None)
@given(scripts, st.sampled_from([0.3, 5.0]), windows, st.integers(0, 10), st.integers(0, 20))
def test_the_first_tokens_exact(script, tau, window, k, n_exact):
    require_oracle(script, AllOf(Margin(tau), ExactFirst(n_exact)), tau, window, k, n_exact=n_exact)


@settings(max_examples=100, deadline=None)
@given(scripts, st.sampled_from([0.3, 5.0]), windows, st.integers(0, 10), st.integers(1, 5))
def test_no_loose_accept_repeats(script, tau, window, k, n_gram):
    """Through windows and rollbacks; what stands in the prompt may come again."""
    require_oracle(script, AllOf(Margin(tau), NoRepeat(n_gram)), tau, window, k, 40, n_gram=n_gram)


@settings(max_examples=100, deadline=None)
@given(scripts, st.sampled_from([0.0, 0.3, 0.4, 1.0]), windows, st.integers(0, 10))
def test_fuzzy_commits_what_the_oracle_commits(script, threshold, window, k):
    """The drafter's rows come with its tokens, through windows and rollbacks."""
    require_oracle(script, Fuzzy("tv", threshold), threshold, window, k, kind=FuzzyOracle)


@settings(max_examples=100, deadline=None)
@given(scripts, st.sampled_from([0.3, 5.0]), windows, st.integers(0, 10), st.integers(4, 20))
def test_the_end_of_the_context(script, tau, window, k, n_ctx):
    engine = run_engine(script, Margin(tau), window, k, 100, n_ctx=n_ctx)
    oracle = Oracle(script, tau, window, k, n_ctx).run(100)
    assert engine == oracle
    assert len(engine) <= n_ctx + 1 - len(PROMPT)


@settings(max_examples=150, deadline=None)
@given(scripts, windows, st.integers(0, 10))
def test_exact_is_greedy_decoding(script, window, k):
    text = list(PROMPT)
    while len(text) < len(PROMPT) + 30 and EOG not in text:
        text.append(script.choice(text))
    expected = text[len(PROMPT) :]
    assert run_engine(script, Exact(), window, k, 30)[:30] == expected


limits = st.tuples(st.integers(0, 12), st.booleans())
parks = st.sets(st.integers(1, 12), max_size=3)


@settings(max_examples=400, deadline=None)
@given(scripts, st.sampled_from([0.3, 5.0]), windows, st.integers(0, 10), limits, parks)
@example(Script(0, 0.2, -9.0), 0.3, Window(1, "reconverge"), 1, (1, False), set())
def test_a_recurrent_target_commits_the_same(script, tau, window, k, limit, park):
    """Snapshots and checkpoints to go back to: the tokens are those of an unlimited target. Without checkpoints no more
    is drafted than the snapshots can take back, and no window outlives its step."""
    draft_max = k if limit[1] else min(k, limit[0])
    tokens = run_engine(script, Margin(tau), window, k, 25, limit=limit, park=park, n_batch=12)
    if limit[1]:
        expected = run_engine(script, Margin(tau), window, k, 25, draft_max=draft_max)
    else:
        expected = Oracle(_Cut(script, draft_max), tau, window, k, 4096, falls_back=True).run(25)
    n = min(len(tokens), len(expected))
    assert n >= min(25, len(expected))
    assert tokens[:n] == expected[:n]


class _Cut:
    """A script whose drafts are cut to a length."""

    def __init__(self, script, k):
        self.row, self.choice, self._script, self._k = script.row, script.choice, script, k

    def draft(self, history, k):
        return self._script.draft(history, k)[: self._k]


@pytest.mark.parametrize("limit", [(0, True), (2, True), (5, True), (5, False)])
def test_another_sequence_on_a_recurrent_target_starts_from_its_checkpoint_or_anew(limit):
    script = Script(3, 0.5, -9.0)
    n_shown = [0]

    def row(history):
        n_shown[0] += 1
        return script.row(history)

    with ScriptedTarget(row, N_VOCAB, 4096, 64, recurrent=limit) as target, Engine(target) as engine:
        engine.configure(Exact(), Window(), [(CallbackDrafter(lambda h: script.draft(h, 5)), 5)])
        prompt = [2, 3, 4, 5, 6, 7, 8] * 5
        outputs = []
        for history, n_evaluated in ((prompt, 0), (prompt, 34), ([*prompt[:20], 2, 2, 2], 20), (prompt, 20)):
            engine.begin(history, n_evaluated)
            assert engine.n_evaluated == (34 if n_evaluated == 34 and limit[1] else 0)  # where the prompt ended
            while engine.prefill():
                pass
            out = []
            while len(out) < 20:
                engine.step()
                out += [token for _, token in engine.tokens()]
            text = list(history)
            for token in out:
                assert token == script.choice(text)
                text.append(token)
            outputs.append(out[:20])
            engine.end(len(history) + 10)
            assert engine.n_evaluated == len(history) + 10
        assert outputs[0] == outputs[1] == outputs[3]


def test_a_window_across_steps_is_withheld_until_it_is_decided():
    # Token 5 is nearly as likely as the target's 4 after 4; afterwards nothing is right.
    def row(history):
        out = np.full(N_VOCAB, -5.0, dtype=np.float32)
        out[4] = 1.0
        if len(history) == 3:
            out[5] = 0.9
        return out

    with ScriptedTarget(row, N_VOCAB) as target, Engine(target) as engine:
        drafter = CallbackDrafter(lambda h: [5] if len(h) == 3 else [6])
        engine.configure(Margin(0.3), Window(3, rule="reconverge"), [(drafter, 4)])
        engine.begin(PROMPT)
        assert [engine.step() for _ in range(2)] == [0, 0]  # 5 and two of the target's own: provisional
        assert engine.step() == 1  # no draft matched: back to position 3
        assert engine.tokens() == [(3, 4)]
        assert engine.record(0).reason == "window"
        assert engine.record(0).rejected[0] == 5
        counters = engine.counters()
        assert (counters["rollbacks"], counters["rolled_back"], counters["rejected_window"]) == (1, 3, 1)


@pytest.mark.parametrize("limit", [None, (0, True), (3, True)])
@pytest.mark.parametrize("behind", [[], [4, 4]])
def test_a_step_without_a_draft_rejects_what_only_a_draft_could_confirm(behind, limit):
    """As many steps as exact decoding takes. The drafter may go on behind the target's own choice."""

    def row(history):
        out = np.full(N_VOCAB, -5.0, dtype=np.float32)
        out[4], out[5] = 1.0, 0.9
        return out

    def draft(history):
        return [5] if len(history) == 3 else behind if history[-1] == 4 and 5 not in history else []

    with ScriptedTarget(row, N_VOCAB, recurrent=limit) as target, Engine(target) as engine:
        engine.configure(Margin(0.3), Window(6, rule="reconverge"), [(CallbackDrafter(draft), 4)])
        engine.begin(PROMPT)
        while engine.prefill():
            pass
        assert engine.step() == 0  # 5, and 4 of the target's own
        assert engine.step() == 2 + len(behind)
        assert [token for _, token in engine.tokens()] == [4] * (2 + len(behind))
        assert engine.record(0).reason == "boundary" and engine.record(0).rejected == (5, 4)
        counters = engine.counters()
        assert (counters["rollbacks"], counters["rolled_back"]) == (1, 2)


def test_an_open_window_gets_its_drafts_where_nobody_wants_more_tokens():
    def row(history):
        out = np.full(N_VOCAB, -5.0, dtype=np.float32)
        out[4], out[5] = 1.0, 0.9
        return out

    with ScriptedTarget(row, N_VOCAB) as target, Engine(target) as engine:
        drafter = CallbackDrafter(lambda h: [5] if len(h) == 3 else [4, 4])
        engine.configure(Margin(0.3), Window(6, rule="reconverge"), [(drafter, 4)])
        engine.begin(PROMPT)
        engine.want(2)
        assert engine.step() == 0  # 5 and the target's own
        assert engine.step() >= 2  # a draft matched: 5 stands
        assert engine.tokens()[:2] == [(3, 5), (4, 4)]
        assert engine.step() == 1 and engine.counters()["drafted"] == 3, "no window is open: nothing is drafted"


def test_a_window_falls_back_to_its_step_where_the_memory_cannot_come_back():
    def row(history):
        out = np.full(N_VOCAB, -5.0, dtype=np.float32)
        out[4], out[5] = 1.0, 0.9
        return out

    for limit, n_fallbacks in ((None, 0), ((3, True), 0), ((3, False), 1)):
        with ScriptedTarget(row, N_VOCAB, recurrent=limit) as target, Engine(target) as engine:
            drafter = CallbackDrafter(lambda h: [5] if len(h) == 3 else [4])
            engine.configure(Margin(0.3), Window(3, rule="reconverge"), [(drafter, 4)])
            engine.begin(PROMPT)
            first = engine.step()
            tokens = [token for _, token in engine.tokens()]
            if n_fallbacks:
                assert tokens == [4] and engine.record(0).reason == "boundary"
            else:
                assert first == 0
                engine.step()
                assert [token for _, token in engine.tokens()][:2] == [5, 4]
            counters = engine.counters()
            assert counters["window_fallbacks"] == counters["rollbacks"] == n_fallbacks
            assert counters["rejected_boundary"] == n_fallbacks
            assert counters["checkpoints"] == 2 * (limit == (3, True)), "of the prompt and of the window"


def test_the_governor_leaves_a_drafter_that_takes_its_time_and_declines():
    calls = [0]

    def draft(history):
        calls[0] += 1
        time.sleep(2e-3)
        return []

    def row(history):
        time.sleep(1e-3)
        return np.eye(N_VOCAB, dtype=np.float32)[5]

    with ScriptedTarget(row, N_VOCAB) as target, Engine(target) as engine:
        engine.configure(Exact(), Window(), [(CallbackDrafter(draft), 100)], adaptive=True)
        engine.begin(PROMPT)
        for _ in range(120):
            engine.step()
        assert calls[0] < 30
        ((_, acceptance),) = engine.governor().acceptance_at_depth
        assert len(acceptance) == 64 and acceptance[0] < 0.5


def test_a_row_that_is_not_finite_ends_the_sequence_and_leaves_the_engine_usable():
    broken = [True]

    def row(history):
        out = np.zeros(N_VOCAB, dtype=np.float32)
        out[3] = 1.0
        if broken[0] and len(history) > 5:
            out[2] = np.nan
        return out

    with ScriptedTarget(row, N_VOCAB) as target, Engine(target) as engine:
        engine.configure(Exact(), Window())
        engine.begin(PROMPT)
        with pytest.raises(NotFiniteError, match="without a distribution"):
            while True:
                engine.step()
        with pytest.raises(ValueError, match="no sequence was begun"):
            engine.step()
        broken[0] = False
        engine.begin([*PROMPT, 3])
        assert engine.step() == 1


def test_bad_arguments_change_nothing():
    script = Script(1, 0.5, -9.0)
    drafter = CallbackDrafter(lambda h: [])
    with ScriptedTarget(script.row, N_VOCAB, n_ctx=50, n_batch=8) as target, Engine(target) as engine:
        with pytest.raises(ValueError, match="keep draft_max under n_batch"):
            engine.configure(Exact(), Window(), [(drafter, 8)])
        for history, message in (
            ([], "at least one token"),
            ([9], "outside the vocabulary"),
            ([2] * 51, "raise n_ctx"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.begin(history)
        engine.begin(PROMPT)
        with pytest.raises(ValueError, match="between requests"):
            engine.configure(Exact(), Window())
        assert engine.step() == 1


NEAR = {(2,): (3, 4), (2, 4): (5,), (2, 4, 5): (EOG,), (2, 3): (5,)}
"""What is likely behind a text, the likeliest first; EOG behind all others."""


def near_row(history):
    row = np.full(N_VOCAB, -9.0, dtype=np.float32)
    for i, token in enumerate(NEAR.get(tuple(int(t) for t in history), (EOG,))):
        row[token] = -0.1 * i
    return row


@pytest.mark.parametrize("gate", [Margin(0.3), Entropy(0.3)], ids=str)
@pytest.mark.parametrize(
    ("window", "draft", "expected"),
    [
        (Window(2), [4, 5, 8, 6, 6, 6, 6, 6], [3]),  # EOG is chosen where something else was drafted
        (Window(2), [4, 5, EOG, 6], [4, 5, EOG]),
        (Window(3), [4, 5, EOG, 6], [3]),  # the text ends before the window does
        (Window(2, rule="reconverge"), [4, 5, 8], [4, 5, EOG]),
        (Window(2, rule="reconverge", across_rounds=False), [4, 6, 8], [3]),
    ],
    ids=str,
)
def test_the_end_of_a_text_is_an_ordinary_position_of_a_window(gate, window, draft, expected):
    with ScriptedTarget(near_row, N_VOCAB) as target, Engine(target) as engine:
        target.protect([PROTECTED], [EOG])
        engine.configure(gate, window, [(CallbackDrafter(lambda h: draft if len(h) == 1 else []), 8)])
        engine.begin([2])
        assert engine.step() == len(expected)
        assert [token for _, token in engine.tokens()] == expected
    rows = np.array([near_row([2, *draft[:i]]) for i in range(len(draft) + 1)])
    in_step = replace(window, across_rounds=False)
    assert verify(rows, draft, gate, in_step, {PROTECTED}, eog={EOG}).tokens == expected


def test_a_text_that_ends_with_an_open_window_rolls_back():
    """A reconverging window, in whose second step the target ends the text."""
    with ScriptedTarget(near_row, N_VOCAB) as target, Engine(target) as engine:
        target.protect([PROTECTED], [EOG])
        engine.configure(
            Margin(0.3), Window(4, rule="reconverge"), [(CallbackDrafter(lambda h: [4] if len(h) == 1 else [8, 8]), 8)]
        )
        engine.begin([2])
        assert engine.step() == 0  # 4, and 5 of the target's own
        assert engine.step() == 1 and engine.tokens() == [(1, 3)]
        assert engine.record(0).reason == "boundary"
        assert engine.record(0).rejected == (4, 5, EOG)


class Chain:
    """Stands for a llama_cpp LlamaSampler; no chain: the argmax."""

    sampler = None


def test_a_sampler_lives_as_long_as_the_engine_may_call_back_into_it():
    """The engine's copy of a chain holds pointers to what Python wrote for it."""
    script = Script(1, 0.5, -9.0)
    with ScriptedTarget(script.row, N_VOCAB, n_ctx=50) as target, Engine(target) as engine:
        engine.configure(Exact(), Window(), resumable=True)
        samplers = [Chain(), Chain()]
        first, second = (weakref.ref(sampler) for sampler in samplers)
        engine.begin(PROMPT, 0, samplers[0])
        samplers[0] = None
        engine.step()
        for refused in ([], [9], [2] * 51):
            with pytest.raises(ValueError):
                engine.begin(refused, 0, Chain())
        with pytest.raises(ValueError):
            engine.resume(len(PROMPT) + 1, [9])
        gc.collect()
        assert first() is not None  # neither a refused begin nor a refused resume replaced it
        engine.resume(len(PROMPT) + 1, [3])
        assert first() is not None
        engine.begin(PROMPT, 0, samplers[1])
        samplers[1] = None
        gc.collect()
        assert first() is None and second() is not None
        engine.end(0)
        gc.collect()
        assert second() is None


@given(
    st.integers(0, 10_000), st.floats(0.0, 1.0), st.sampled_from([Window(2), Window(3, rule="reconverge")]),
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(2, 8), min_size=0, max_size=3)), max_size=6),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_sequence_goes_on_behind_any_token_of_its_last_step(seed, agreement, window, sends):
    """`resume` is the same as a new sequence with the same tokens; another place is refused."""
    script = Script(seed, agreement, -9.0)

    def run(on_send):
        drafter = CallbackDrafter(lambda history: script.draft(history, 5))
        text = list(PROMPT)
        with ScriptedTarget(script.row, N_VOCAB) as target, Engine(target) as engine:
            engine.configure(Margin(0.8), window, [(drafter, 5)], resumable=True)
            engine.begin(text)
            for which, tokens in sends:
                committed = []
                while not committed:
                    engine.step()
                    committed = engine.tokens()
                n_keep = committed[which % len(committed)][0] + 1
                with pytest.raises(ValueError, match="only after a token that its last step committed"):
                    engine.resume(committed[-1][0] + 2, tokens)
                text = [*engine.history()[:n_keep].tolist(), *tokens]
                on_send(engine, n_keep, tokens, text)
                assert engine.history().tolist() == text
            while len(text) < 60:
                engine.step()
                text += [token for _, token in engine.tokens()]
        return text

    def begin_again(engine, n_keep, tokens, text):
        engine.end(n_keep - 1)
        engine.begin(text, n_keep - 1)

    assert run(lambda engine, n_keep, tokens, text: engine.resume(n_keep, tokens)) == run(begin_again)
