"""Hybrid targets: whatever is drafted and rejected, the state is that of the committed tokens."""

from __future__ import annotations

import random
import textwrap
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf
from heads import Script, error_in_subprocess, second_choice, take

from pyfly_cpp import Exact, FlyLlama, Margin, Window
from pyfly_cpp._native import Batch, LlamaTarget

MODEL = Path(__file__).parents[2] / "models" / "tiny" / "tiny-qwen35-mtp-f16.gguf"
SETTINGS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
N_VOCAB = 1536
# Twice the largest difference between batched and single evaluation of this model, 1.7e-3. A wrong state is off by 0.5.
TOLERANCE = 4e-3


@pytest.fixture(scope="module")
def reference():
    llm = llama_cpp.Llama(str(MODEL), **SETTINGS)
    yield llm
    llm.close()


def logits_after(llm):
    """The row behind the last token of the context's last batch."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (N_VOCAB,)).copy()


def fresh_logits(reference, tokens):
    reference.reset()
    reference.eval(tokens)
    return logits_after(reference)


def plain(reference, prompt, n):
    """Greedy tokens, one evaluation each."""
    reference.reset()
    reference.eval(prompt)
    out = []
    for _ in range(n):
        out.append(int(logits_after(reference).argmax()))
        reference.eval(out[-1:])
    return out


def assert_greedy(reference, prompt, tokens):
    """Each token is the best one of a fresh evaluation of its own context, within the noise."""
    reference.reset()
    reference.eval(prompt)
    for token in tokens:
        row = logits_after(reference)
        assert row.max() - row[token] < TOLERANCE
        reference.eval([token])


def random_prompt(rng, n):
    return [rng.randrange(1500) for _ in range(n)]


# (drafted in a step, snapshots): all by snapshots; some deeper than they reach; none, so by checkpoints.
@pytest.mark.slow
@pytest.mark.parametrize(("k", "n_snapshots"), [(3, 3), (6, 6), (6, 3), (4, 0)])
def test_rejections_at_every_depth(reference, k, n_snapshots):
    script = Script(k)
    llm = FlyLlama(MODEL, drafter=script if n_snapshots else None, draft_max=n_snapshots, **SETTINGS)
    llm.drafter, llm.draft_max = script, k
    assert llama_cpp.llama_n_rs_seq(llm.ctx) == n_snapshots
    rng = random.Random(k)
    for i in range(200 if k < 6 else 60):
        prompt = random_prompt(rng, rng.randrange(1, 12))
        n = rng.randrange(1, 2 * k + 4)
        script.text = prompt + plain(reference, prompt, n + k + 1)
        tokens = take(llm.generate(prompt, temp=0.0), n)
        assert_greedy(reference, prompt, tokens)
        assert llm.n_tokens == len(prompt) + n - 1
        if i % 4 == 0:  # the state is that of n_tokens tokens: whoever goes on from here sees it
            llm.eval(tokens[-1:])
            fresh = fresh_logits(reference, prompt + tokens)
            np.testing.assert_allclose(logits_after(llm), fresh, atol=TOLERANCE)
    stats = llm.stats
    depths = stats.drafted_at_depth[:k]
    assert len(depths) == k
    assert all(0 < a < d for a, d in zip(stats.accepted_at_depth, depths))
    assert (stats.replayed == 0) == (n_snapshots >= k)
    llm.close()


def test_batches_that_hold_fewer_snapshots(reference, tmp_path):
    """llama.cpp ends the process where a batch is not longer than the last token and its snapshots. n_ctx limits
    n_batch as it is given, though the context that comes is longer; 0 is what the file was trained with."""
    code = """
        import llama_cpp
        for name, size in [("n_ubatch", n) for n in (2, 3, 4, 5, 8)] + [("n_batch", 4), ("n_batch", 8), ("n_ctx", 4),
                                                                      ("n_ctx", 8), ("n_ctx", 11), ("n_ctx", 18)]:
            for drafter in (MTP(), lambda history: history[-9:]):
                llm = FlyLlama(paths[0], drafter=drafter, adaptive=False, **{**settings, name: size})
                assert llama_cpp.llama_n_rs_seq(llm.ctx) <= max(0, size - 2)
                n = 1 if name == "n_ctx" else 20
                tokens = [token for token, _ in zip(llm.generate([20, 21, 22], temp=0.0), range(n))]
                assert tokens == EXPECTED[:n], (name, size, tokens)
                llm.close()
        llm = FlyLlama(paths[1], drafter=MTP(), adaptive=False, **{**settings, "n_ctx": 0})
        assert next(llm.generate([20, 21, 22], temp=0.0)) == EXPECTED[0]"""
    short = edit_gguf(MODEL, tmp_path / "short.gguf", {"qwen35.context_length": 8})
    code = textwrap.dedent(code).replace("EXPECTED", str(plain(reference, [20, 21, 22], 20)))
    assert error_in_subprocess(code, MODEL, short) == "no error"


@pytest.mark.alike
@pytest.mark.parametrize("n_snapshots", [3, 0])
def test_windows_across_steps_that_break_come_back_to_the_mismatch(reference, n_snapshots):
    """Every draft is wrong, every mismatch deferred, no window ever holds: the text is the plain one."""

    class Wrong:
        def __call__(self, history):
            nearest = fresh_logits(reference, [int(t) for t in history]).argsort()[::-1]
            second = next(int(t) for t in nearest[1:] if t < 1500)
            return np.array([second, 7, 7], dtype=np.intc)

    gate, window = Margin(50.0), Window(4, rule="reconverge")
    drafter = Wrong()
    llm = FlyLlama(
        MODEL, drafter=drafter if n_snapshots else None, draft_max=n_snapshots, gate=gate, window=window, **SETTINGS
    )
    llm.drafter, llm.draft_max = drafter, 3
    prompt = random_prompt(random.Random(5), 9)
    expected = plain(reference, prompt, 12)
    assert take(llm.generate(prompt, temp=0.0), 12) == expected
    assert llm.stats.rollbacks > 0
    llm.eval([expected[-1]])
    np.testing.assert_allclose(logits_after(llm), fresh_logits(reference, prompt + expected), atol=TOLERANCE)
    llm.close()


@pytest.mark.parametrize("n_snapshots", [3, 0])
def test_windows_across_steps_come_back_by_checkpoints(reference, n_snapshots):
    """The depth of the snapshots does not reach into earlier steps, but a copy of the state does: no window falls back
    to its step, and the stats say what it costs."""
    drafter = second_choice(reference, 4)
    llm = FlyLlama(
        MODEL, drafter=drafter if n_snapshots else None, draft_max=n_snapshots, gate=Margin(50.0),
        window=Window(6, rule="reconverge"), trace=True, **SETTINGS,
    )  # fmt: skip
    llm.drafter, llm.draft_max = drafter, 3
    prompt = random_prompt(random.Random(6), 9)
    text = take(llm.generate(prompt, temp=0.0), 24)
    reference.reset()
    reference.eval(prompt)
    for record, token in zip(llm.records, text):
        row = logits_after(reference)
        assert row.max() - row[record.choice] < TOLERANCE
        reference.eval([token])
    stats = llm.stats
    assert stats.rollbacks > 0
    assert stats.window_fallbacks == 0
    assert stats.checkpoints > stats.rollbacks
    assert stats.replayed > 0
    llm.close()


@pytest.mark.alike
@pytest.mark.parametrize(("k", "n_snapshots"), [(3, 3), (4, 0)])
def test_states_that_are_saved_in_the_middle_of_a_step(reference, k, n_snapshots):
    script = Script(k)
    llm = FlyLlama(MODEL, drafter=script if n_snapshots else None, draft_max=n_snapshots, **SETTINGS)
    llm.drafter, llm.draft_max = script, k
    other = FlyLlama(MODEL, **SETTINGS)
    prompt = random_prompt(random.Random(9), 20)
    expected = plain(reference, prompt, 40)
    script.text = prompt + expected
    stream = llm.generate(prompt, temp=0.0)
    out = []
    for n in range(1, 31):
        out.append(next(stream))
        if n % 3 == 0:
            other.drafter = None
            other.load_state(_fitting(llm, other))
            assert other.n_tokens == len(prompt) + n - 1
            other.eval([expected[n - 1]])
            np.testing.assert_allclose(
                logits_after(other), fresh_logits(reference, prompt + expected[:n]), atol=TOLERANCE
            )
    stream.close()
    assert out == expected[:30]
    # Back to an earlier state, and on from there.
    state = llm.save_state()
    take(llm.generate(random_prompt(random.Random(1), 9), temp=0.0), 5)
    llm.load_state(state)
    assert take(llm.generate([*prompt, *expected[:30]], temp=0.0), 10) == expected[30:40]
    llm.close()
    other.close()


def _fitting(llm, other):
    """The state of `llm`, checked to be one that a context without snapshots takes."""
    state = llm.save_state()
    assert other.n_ctx() == llm.n_ctx()
    return state


def test_prefixes_are_reused_from_the_end_of_the_prompt(reference):
    script = Script(3)
    llm = FlyLlama(MODEL, drafter=script, draft_max=3, **SETTINGS)
    prompt = random_prompt(random.Random(2), 60)
    expected = plain(reference, prompt, 20)
    script.text = prompt + expected
    for n_evaluated in (60, 1):  # the second answer to the same prompt starts behind it
        llm.reset_stats()
        assert take(llm.generate(prompt, temp=0.0), 20) == expected
        assert llm.stats.prefilled == n_evaluated - 1
    # A conversation goes on from where it ended.
    longer = [*prompt, *expected, *random_prompt(random.Random(3), 10)]
    expected = plain(reference, longer, 10)
    script.text = longer + expected
    llm.reset_stats()
    assert take(llm.generate(longer, temp=0.0), 10) == expected
    assert llm.stats.prefilled == 10
    # Another request of the same beginning starts anew, and so does this one after a reset.
    other = [*prompt[:30], *random_prompt(random.Random(4), 5)]
    expected = plain(reference, other, 10)
    script.text = other + expected
    for _ in range(2):
        assert take(llm.generate(other, temp=0.0), 10) == expected
        llm.reset()
    llm.close()


def test_a_model_that_cannot_go_back_says_so_once(monkeypatch):
    llm = FlyLlama(MODEL, drafter=Script(3), draft_max=3, **SETTINGS)
    monkeypatch.setattr(type(llm.loaded.decoder.target), "can_rewind", property(lambda self: False))
    with pytest.warns(UserWarning, match="decoded without speculation"):
        take(llm.generate([5, 6, 7], temp=0.0), 3)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(llm.generate([5, 6, 7], temp=0.0), 3)
    llm.close()


class Aborts:
    """A context of four requests whose batches stop half-way when `is_on`."""

    def __init__(self, n_snapshots):
        self.is_on = False
        self._callback = llama_cpp.ggml_abort_callback(lambda _: self.is_on)
        model_params = llama_cpp.llama_model_default_params()
        model_params.load_mtp = False
        self._model = llama_cpp.llama_model_load_from_file(str(MODEL).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 1024, 64, 64, 4
        params.kv_unified, params.n_rs_seq, params.n_threads, params.n_threads_batch = True, n_snapshots, 1, 1
        params.abort_callback = self._callback
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._target = LlamaTarget(self._context)
        self.batch = Batch(self._target)
        self.batch.configure([])

    def begin(self, slot, tokens):
        slot.begin(tokens, Exact().nodes(), Window(0).config(), keep_rows=1)

    def close(self):
        self.batch.close()
        self._target.close()
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def row_behind(requests, slot):
    """Of the first step of the slot's request."""
    for _ in range(9):
        for progress in requests.batch.step():
            assert progress.failure is None
            if progress.slot == slot.number and progress.n_records:
                return slot.record_row(0, N_VOCAB)
    raise AssertionError("no step")


@pytest.mark.parametrize("n_snapshots", [0, 2])
def test_a_batch_that_fails_costs_others_no_state(n_snapshots):
    """llama.cpp moves the states of all requests before a batch of some, and copies them only if it is computed."""
    rows = []
    for fails in (False, True):
        requests = Aborts(n_snapshots)
        slots = requests.batch.slots
        for i, slot in enumerate(slots):
            requests.begin(slot, [(7 * i + 3 * j + 5) % 200 + 10 for j in range(12)])
        for _ in range(3):
            requests.batch.step()
        text = [*map(int, slots[1].history()), 33, 34]
        slots[1].end()
        requests.is_on = fails
        requests.batch.step()
        requests.is_on = False
        requests.begin(slots[1], text)
        rows.append(row_behind(requests, slots[1]))
        requests.close()
    assert np.abs(rows[1] - rows[0]).max() < TOLERANCE
