"""Speculative sampling and rFSD: against a NumPy oracle with the same random numbers, and the
tokens that come out of them against the target's own distribution. Each test that draws prints its p-values (-s)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp._internals import LlamaSampler
from one_request import Engine
from sampling_oracle import (
    DRAFTERS,
    N_VOCAB,
    PROMPT,
    Fit,
    Random,
    Script,
    choose_beside,
    one_hot,
    sample,
    sampler,
    softmax,
    tokens_of_a_step,
)

from pyfly_cpp import Exact, Fuzzy, Margin, Stochastic, Window, verify
from pyfly_cpp._native import Batch, CallbackDrafter, RowDrafter, ScriptedTarget
from pyfly_cpp.decoding.gates import AllOf, AnyOf, ExactFirst
from pyfly_cpp.errors import NotFiniteError

DRAWN, RFSD = Stochastic(), Fuzzy("js", 0.0, residual=True)
RULES = [DRAWN, RFSD]
EOG = 0


# ---- verify() against the oracle -------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*RULES, Fuzzy("tv", 0.3, residual=True)]), st.integers(0, 8), st.integers(1, 30), st.booleans(),
       st.integers(0, 2**32 - 1))  # fmt: skip
def test_verify_equals_the_oracle(gate, k, v, is_drawn, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(scale=rng.choice([0.5, 2.0]), size=(k + 1, v)).astype(np.float32)
    draft_rows = (rows[:k] + rng.normal(scale=rng.choice([0.1, 1.5]), size=(k, v))).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = -np.inf
    rows[np.arange(k + 1), rng.integers(0, v, k + 1)] = 1.0
    draft_rows[rng.random(draft_rows.shape) < 0.1] = -np.inf
    draft_rows[np.arange(k), rng.integers(0, v, k)] = 1.0
    p, q = [softmax(row) for row in rows], [softmax(row) for row in draft_rows]
    draft = [int(rng.choice(v, p=each)) for each in q]
    if not is_drawn and not isinstance(gate, Fuzzy):
        q = [one_hot(token, v) for token in draft]
        draft_rows = None
    result = verify(rows, draft, gate, draft_logits=draft_rows, seed=seed)
    random = Random(seed)
    choices = [choose_beside(p[i], q[i], token, random) for i, token in enumerate(draft)]
    distances = [np.abs(p[i] - q[i]).sum() / 2 for i in range(k)]
    is_close = [isinstance(gate, Fuzzy) and gate.threshold > 0 and d <= gate.threshold for d in distances]
    if isinstance(gate, Fuzzy) and any(abs(d - gate.threshold) < 1e-5 for d in distances):
        return
    reasons = [
        "match" if choice == token else "loose" if close and p[i][token] > 0 else "rejected"
        for i, (choice, token, close) in enumerate(zip(choices, draft, is_close))
    ]
    n = next((i for i, reason in enumerate(reasons) if reason == "rejected"), k)
    choices.append(random.draw(p[k]) if n == k else -1)
    if random.closest < 1e-6:
        return  # float32 and float64 may disagree
    assert result.n_accepted == n
    assert result.tokens == [*draft[:n], choices[n]]
    assert [d.choice for d in result.decisions] == choices[:k]
    assert [d.reason if d.accepted else "rejected" for d in result.decisions] == reasons
    forbidden = [d.reason == "safety" for d in result.decisions]
    assert forbidden == [r == "rejected" and p[i][t] == 0 for i, (r, t) in enumerate(zip(reasons, draft))]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_step_has_the_targets_distribution(k, is_drawn):
    """Computed over all drafts, not sampled: of the oracle, which verify() equals number by number."""
    n_vocab = 3
    for seed in range(24):
        scale = [0.3, 1.0, 3.0][seed % 3]
        target, drafter = Script(seed, scale, n_vocab), Script(1000 + seed, scale, n_vocab)

        def p_of(tokens, target=target):
            return softmax(target.row([0, *tokens]))

        def q_of(tokens, drafter=drafter):
            q = softmax(drafter.row([0, *tokens]))
            return q if is_drawn else one_hot(int(q.argmax()), n_vocab)

        found = tokens_of_a_step(p_of, q_of, k, n_vocab)
        for tokens in itertools.product(range(n_vocab), repeat=k + 1):
            true = np.prod([p_of(tokens[:i])[token] for i, token in enumerate(tokens)])
            assert found.get(tokens, 0.0) == pytest.approx(true, abs=1e-12)


# ---- The engine against the oracle -----------------------------------------------------------------------------------


def oracle_text(script, draft_q, k, gate, temperature, n_tokens, seed):
    """What an engine commits, step by step; None where it is too close to call."""
    random, text, out, n_vocab = Random(seed), list(PROMPT), [], script.n_vocab
    while len(out) < n_tokens:
        drafted, q = [], []
        for i in range(k):
            q_i = draft_q([*text, *drafted], i)
            token = random.draw(q_i) if isinstance(q_i, np.ndarray) else q_i
            if token is None:
                break
            drafted.append(token)
            q.append(q_i if isinstance(q_i, np.ndarray) else one_hot(token, n_vocab))
        p = [softmax(script.row([*text, *drafted[:i]]) / np.float64(temperature)) for i in range(len(drafted) + 1)]
        tokens = []
        for i, token in enumerate(drafted):
            tokens.append(choose_beside(p[i], q[i], token, random))
            if tokens[-1] != token or token == EOG:
                break
        else:
            tokens.append(random.draw(p[-1]))
        out, text = out + tokens, text + tokens
    return None if random.closest < 1e-6 else out


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.integers(0, 6), st.sampled_from([0.7, 1.0]), st.booleans(), st.integers(0, 2**32 - 2))
def test_a_text_equals_the_oracle(gate, k, temperature, is_drawn, seed):
    target, drafter = Script(seed % 7), Script(seed % 5 + 100)
    guess = drafter.row

    def drawn(history, i):
        return softmax(guess(history) / np.float64(temperature))

    def given(history, i):
        return int(guess(history).argmax()) if i < len(history) % 4 else None

    def propose(history):
        out, i = list(history), 0
        while (token := given(out, i)) is not None:
            out.append(token)
            i += 1
        return out[len(history) :]

    if gate is RFSD:
        is_drawn = True
    native = RowDrafter(guess, N_VOCAB) if is_drawn else CallbackDrafter(propose)
    expected = oracle_text(target, drawn if is_drawn else given, k, gate, temperature, 25, seed)
    with ScriptedTarget(target.row, N_VOCAB) as scripted, Engine(scripted) as engine:
        scripted.protect([], [EOG])
        engine.configure(gate, Window(0), [(native, k)])
        engine.begin(PROMPT, 0, sampler(seed, temperature))
        found, records = [], []
        while len(found) < 25:
            n = engine.step()
            records += [engine.record(i) for i in range(n)]
            found += [token for _, token in engine.tokens()]
        counters = engine.counters()
    if expected is None:
        return
    assert found == expected[: len(found)] and len(expected) == len(found)
    assert counters["loose_accepted"] == 0
    assert counters["matched"] == sum(record.origin == "matched" for record in records)
    assert all(record.token == record.choice for record in records)
    assert all((record.origin == "target") == (record.depth == 0) for record in records)
    assert counters["rejected_gate"] + counters["rejected_safety"] == sum(bool(r.rejected) for r in records)


@pytest.mark.parametrize("gate", RULES)
def test_a_trace_measures_what_it_says(gate):
    target, drafter = Script(3), Script(4)
    with ScriptedTarget(target.row, N_VOCAB) as scripted, Engine(scripted) as engine:
        engine.configure(gate, Window(0), [(RowDrafter(drafter.row, N_VOCAB), 2)], trace=True)
        engine.begin(PROMPT, 0, sampler(5, 0.7))
        text, origins = list(PROMPT), set()
        for _ in range(40):
            for i in range(engine.step()):
                record = engine.record(i)
                row = target.row(text).astype(np.float64)
                log_p = np.log(softmax(row))
                drafted = record.rejected[0] if record.rejected else record.token
                assert record.logprob == pytest.approx(log_p[record.token], abs=1e-5)
                assert record.margin == pytest.approx(log_p.max() - log_p[drafted], abs=1e-5)
                assert record.entropy == pytest.approx(-(np.exp(log_p) * log_p).sum(), abs=1e-5)
                text.append(record.token)
                origins.add((record.origin, record.reason))
        assert engine.history().tolist() == text
    assert origins == {("matched", "match"), ("target", "gate"), ("target", "bonus")}


@pytest.mark.parametrize("gate", [*RULES, AllOf(Fuzzy("tv", 0.4, residual=True), ExactFirst(9))])
def test_at_temperature_zero_it_is_exact(gate):
    """Or, where divergences decide, fuzzy speculative decoding."""
    target, drafter = Script(3), Script(3, 1.7)
    plain = AllOf(Fuzzy("tv", 0.4), ExactFirst(9)) if isinstance(gate, AllOf) else Exact()

    def run(gate):
        with ScriptedTarget(target.row, N_VOCAB) as scripted, Engine(scripted) as engine:
            engine.configure(gate, Window(0), [(RowDrafter(drafter.row, N_VOCAB), 4)])
            engine.begin(PROMPT)
            records = [engine.record(i) for _ in range(20) for i in range(engine.step())]
            out = [(r.position, r.token, r.origin, r.choice, r.depth, r.reason, r.rejected) for r in records]
            return out, engine.counters()["loose_accepted"]

    assert run(gate) == run(plain)


# ---- The distribution of what comes out ------------------------------------------------------------------------------

SETTINGS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "top-k": {"temperature": 0.9, "top_k": 3},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p and penalties": {"temperature": 0.8, "min_p": 0.1, "penalty": 1.5},
    "a banned token": {"temperature": 0.9, "banned": [1, 4]},
}


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("gate", RULES, ids=str)
def test_three_tokens_have_the_targets_distribution(gate, how):
    place = 6 * RULES.index(gate) + list(SETTINGS).index(how)
    which = DRAFTERS[place % (2 if gate is RFSD else 3)]
    fit = sample(Script(11), Script(12), gate, SETTINGS[how], which, 700, first_seed=1000 * place)
    print(f"{gate}, {how}, {which}: {fit}")
    fit.require()


def test_the_statistics_notice_a_wrong_distribution():
    """A draft accepted with min(1, p / q) whose rejection is followed by a draw from p, as in fuzzy decoding."""
    target, guess, rng = Script(11), Script(12), np.random.default_rng(0)
    p, q = softmax(target.row(PROMPT)), softmax(guess.row(PROMPT))
    observed = []
    for _ in range(700):
        token = rng.choice(N_VOCAB, p=q)
        observed.append(int(token if rng.random() < p[token] / q[token] else rng.choice(N_VOCAB, p=p)))
    with pytest.raises(AssertionError):
        Fit(observed, dict(enumerate(p))).require()


# ---- Several requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", RULES, ids=str)
def test_requests_that_wait_for_room_are_what_they_are_alone(gate):
    """A step that could not be evaluated had drafted already; it is drafted again with the same numbers."""
    target, drafter = Script(21), RowDrafter(Script(22).row, N_VOCAB)

    def answers(n_slots, prompts, seeds, n_cells):
        found, has_waited = {}, False
        with (
            ScriptedTarget(target.row, N_VOCAB, 60, 16, n_sequences=n_slots, n_cells=n_cells) as scripted,
            Batch(scripted) as batch,
        ):
            batch.configure([(drafter, 4)])
            for slot, prompt, seed in zip(batch.slots, prompts, seeds):
                slot.begin(prompt, gate.nodes(), Window(0).config(), sampler=sampler(seed, 0.9))
                found[slot.number] = []
            while any(slot.has_request for slot in batch.slots):
                for progress in batch.step():
                    slot = batch.slots[progress.slot]
                    found[slot.number] += [token for _, token in slot.tokens()]
                    has_waited |= progress.is_waiting
                    if len(found[slot.number]) >= 30:
                        slot.end()
        return [found[i][:30] for i in range(n_slots)], has_waited

    prompts, seeds = [[2 + i] * (i + 1) for i in range(4)], [7, 7, 8, 9]
    together, has_waited = answers(4, prompts, seeds, 90)
    assert has_waited
    alone = [answers(1, [prompt], [seed], 60)[0][0] for prompt, seed in zip(prompts, seeds)]
    assert together == alone


# ---- Bad input -------------------------------------------------------------------------------------------------------

ROWS = np.zeros((2, 3), dtype=np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_tokens": [0, 0]}, "draws the target's tokens itself; give a seed"),
        ({"window": Window(3)}, "decides about a draft at once; leave the window at None"),
        ({"window": Window(0, tail=2)}, "leave the window at None"),
        ({"seed": -1}, "seed must be an integer in 0"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"draft_logits": [[-np.inf, 0, 0]]}, "draft token 0 cannot be drawn from row 0 of draft_logits"),
        ({"gate": Fuzzy(residual=True)}, "give draft_logits"),
    ],
)
def test_bad_input_of_verify(arguments, message):
    with pytest.raises(ValueError, match=message):
        verify(**{"logits": ROWS, "draft": [0], "gate": DRAWN, **arguments})


def test_rows_without_a_distribution():
    with pytest.raises(NotFiniteError, match="draft_logits row 0 has no distribution"):
        verify(ROWS, [0], DRAWN, draft_logits=[[np.nan, 0, 0]])
    with pytest.raises(NotFiniteError, match="logits row 0 has no distribution"):
        verify(np.full((2, 3), -np.inf), [0], DRAWN)


@pytest.mark.parametrize("gate", RULES, ids=str)
def test_logits_that_are_not_finite_once_divided(gate):
    """The largest share what there is to draw; where none is left, the request stops and the next one runs."""
    rows = {"large": [2.0, 1.0, -1.0, -2.0, -3.0, -4.0], "small": [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]}
    target = {"row": rows["large"]}
    drafter = RowDrafter(Script(4).row, N_VOCAB)
    with (
        ScriptedTarget(lambda _: np.array(target["row"], np.float32), N_VOCAB) as scripted,
        Engine(scripted) as engine,
    ):
        engine.configure(gate, Window(0), [(drafter, 0)])
        engine.begin(PROMPT, 0, sampler(5, 1e-40))
        found = set()
        while len(found) < 2:
            engine.step()
            found.update(token for _, token in engine.tokens())
        assert found == {0, 1}
        target["row"] = rows["small"]
        with pytest.raises(NotFiniteError, match="raise the temperature"):
            engine.step()
        for k in (0, 3):
            engine.configure(gate, Window(0), [(drafter, k)])
            engine.begin(PROMPT, 0, sampler(5, 0.7))
            assert engine.step() >= 1
            engine.end()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllOf(DRAWN, ExactFirst(3)), "stochastic accepts nothing loosely.* use it alone"),
        (lambda: AnyOf(Margin(0.3), DRAWN), "stochastic accepts nothing loosely"),
        (lambda: AllOf(Fuzzy("js", 0.1, residual=True), Margin(0.3)), r"takes guards only, such as all\(rfsd-js:0.1,"),
        (lambda: AnyOf(Fuzzy("js", 0.1, residual=True), Margin(0.3)), r"use it alone, not in an any"),
        (lambda: Fuzzy(residual="yes"), "residual must be True or False"),
    ],
)
def test_combinations_without_meaning(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_request_that_cannot_be_served_is_refused():
    target, drafter = Script(1), CallbackDrafter(lambda h: ([2], [[0.0] * N_VOCAB]), N_VOCAB)
    mirostat = LlamaSampler()
    mirostat.add_mirostat_v2(1, 5.0, 0.1)
    with ScriptedTarget(target.row, N_VOCAB) as scripted, Engine(scripted) as engine:
        for gate, window, chain, message in [
            (DRAWN, Window(3), sampler(1), "leave the window at None"),
            (DRAWN, Window(0), mirostat, "leave mirostat_mode at 0, or use another gate"),
            (RFSD, Window(0), sampler(1), "draws its tokens from none; use a draft model or a head"),
        ]:
            engine.configure(gate, window, [(drafter, 3)])
            with pytest.raises(ValueError, match=message):
                engine.begin(PROMPT, 0, chain)
        engine.configure(DRAWN, Window(0), [(drafter, 3)])
        engine.begin(PROMPT, 0, sampler(1))
        assert engine.step() >= 1
