"""Several requests in one llama.cpp context: each gets what it would get alone, whatever their lengths and drafts."""

from __future__ import annotations

import contextlib
import ctypes
import random

import llama_cpp
import pytest
import random_models
from heads import DFLASH, DSPARK, EAGLE3
from teacher_forcing import evaluate, gap

from pyfly_cpp import ContextFullError, Exact, Window
from pyfly_cpp._native import Batch, CallbackDrafter, LlamaTarget, ModelDrafter

N_REQUESTS = 4
# The rows of a batch and of a fresh evaluation differ by 0.01 at most (F16); a wrong state is off by 0.5.
TOLERANCE = 0.03


@contextlib.contextmanager
def opened(path, *, unified=True, n_snapshots=0, load_mtp=False, n_requests=N_REQUESTS, n_ctx=None, request_limit=0):
    """A target of several sequences."""
    model_params = llama_cpp.llama_model_default_params()
    model_params.load_mtp = load_mtp
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx or 256 * n_requests, 64, 64, n_requests
    params.kv_unified, params.n_rs_seq = unified, n_snapshots
    params.n_threads = params.n_threads_batch = 1
    with contextlib.ExitStack() as stack:
        model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        stack.callback(llama_cpp.llama_model_free, model)
        context = llama_cpp.llama_init_from_model(model, params)
        stack.callback(llama_cpp.llama_free, context)
        target = LlamaTarget(ctypes.c_void_p(context) if isinstance(context, int) else context, n_ctx=request_limit)
        stack.callback(target.close)
        yield target


def complete(batch, prompts, n_tokens, draft_max=None):
    """Runs requests together, request i to n_tokens[i] new tokens, each as soon as there is a slot for it; returns the
    tokens and the counters of each."""
    window = Window(0).config()
    waiting, running, out = list(range(len(prompts))), {}, {}
    while waiting or running:
        for slot in batch.slots:
            if waiting and slot.number not in running:
                i = waiting.pop(0)
                slot.begin(prompts[i], Exact().nodes(), window, draft_max=draft_max and [draft_max[i]])
                slot.reset_counters()
                running[slot.number] = (i, [])
        for progress in batch.step():
            assert progress.failure is None, progress.failure
            slot = batch.slots[progress.slot]
            i, new = running[progress.slot]
            if progress.n_records:
                new += [token for _, token in slot.tokens()]
            if len(new) >= n_tokens[i]:
                out[i] = (new, slot.counters())
                slot.end()
                del running[progress.slot]
    return [out[i] for i in range(len(prompts))]


def assert_greedy(path, prompts, answers, n_ctx=512, tolerance=TOLERANCE):
    """Each token is the best one of a fresh evaluation of its own context, within the noise."""
    llm = llama_cpp.Llama(path, n_ctx=n_ctx, n_batch=n_ctx, n_threads=1, n_threads_batch=1, verbose=False)
    try:
        for prompt, (tokens, _) in zip(prompts, answers):
            rows = evaluate(llm, (prompt + tokens)[:-1], 0, len(tokens))
            assert gap(rows, tokens).max() < tolerance
    finally:
        llm.close()


def some_prompts(n=N_REQUESTS):
    rng = random.Random(7)
    lengths = (3, 90, 17, 40, 6, 25, 1, 70, 12, 5)
    return [[rng.randrange(20, 1500) for _ in range(length)] for length in lengths[:n]]


class Corrupted:
    """Drafts the known continuation of whichever request asks, of random length, wrong from a random depth or not."""

    def __init__(self, texts, lengths=(1, 2, 2, 4)):
        self.texts, self.lengths = texts, lengths
        self.rng = random.Random(1)

    def __call__(self, history):
        history = [int(token) for token in history]
        for text in self.texts:
            if text[: len(history)] == history:
                n = self.rng.choice(self.lengths)
                draft = text[len(history) : len(history) + n]
                wrong = self.rng.randrange(2 * n)
                return [token if i < wrong else (token + 7) % 1500 for i, token in enumerate(draft)] or [5]
        return [5]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n_snapshots", [0, 4])
def test_recurrent_states_of_requests_with_rows_of_all_lengths(tiny_qwen35, unified, n_snapshots):
    """Rejections at random depths, while requests end and others begin."""
    prompts = some_prompts(10)
    n_tokens = [random.Random(i).randrange(8, 40) for i in range(len(prompts))]
    options = {"unified": unified, "n_snapshots": n_snapshots}
    with opened(tiny_qwen35, **options) as target, Batch(target) as batch:
        batch.configure([])
        plain = complete(batch, prompts, [44] * len(prompts))
        assert_greedy(tiny_qwen35, prompts, plain)
        script = Corrupted([prompt + tokens for prompt, (tokens, _) in zip(prompts, plain)])
        with CallbackDrafter(script) as drafter:
            batch.configure([(drafter, 4)])
            drafted = complete(batch, prompts, n_tokens)
            assert_greedy(tiny_qwen35, prompts, drafted)
            assert sum(counters["matched"] for _, counters in drafted) > 40


@pytest.mark.parametrize("make", [random_models.rwkv6qwen2, random_models.plamo2])
def test_graphs_that_mix_sequences(make, tmp_path):
    """llama.cpp keeps wrong states of several sequences, or ends the process: what it cannot take together goes alone,
    prompts as well as drafts."""
    path = make(tmp_path / "random.gguf")
    prompts = [[*prompt, 3] for prompt in some_prompts(6)]
    with opened(path) as target, Batch(target) as batch:
        batch.configure([])
        plain = complete(batch, prompts, [20] * len(prompts))
        assert_greedy(path, prompts, plain)
        with CallbackDrafter(Corrupted([p + tokens for p, (tokens, _) in zip(prompts, plain)])) as drafter:
            batch.configure([(drafter, 4)])
            assert_greedy(path, prompts, complete(batch, prompts, [20] * len(prompts)))


@pytest.mark.parametrize("n_snapshots", [0, 4])
def test_recurrent_states_beside_a_sliding_window(n_snapshots, tmp_path):
    """Cells that a window left behind serve other requests, also while drafts are taken back."""
    path = random_models.lfm2(tmp_path / "random.gguf", n_swa=32)
    prompts = some_prompts(10)
    with opened(path, n_snapshots=n_snapshots, n_ctx=256) as target, Batch(target) as batch:
        batch.configure([])
        plain = complete(batch, prompts, [60] * len(prompts))
        assert_greedy(path, prompts, plain, tolerance=0.1)
        script = Corrupted([prompt + tokens for prompt, (tokens, _) in zip(prompts, plain)], (1, 2, 8, 8))
        with CallbackDrafter(script) as drafter:
            batch.configure([(drafter, 8)])
            assert_greedy(path, prompts, complete(batch, prompts, [50] * len(prompts)), tolerance=0.1)


def a_drafter(kind, target, draft):
    if kind == "MTP":
        return ModelDrafter("MTP", "mtp", target, None, 0.0, 4, 1)
    if kind == "EAGLE-3":
        return ModelDrafter("EAGLE-3", "eagle3", target, str(EAGLE3), 0.0)
    if kind in ("DFlash", "DSpark"):
        path = {"DFlash": DFLASH, "DSpark": DSPARK}[kind]
        return ModelDrafter(kind, kind.lower(), target, str(path), 0.0, 4)
    settings = {"n_ctx": 48} if kind == "short draft" else {}
    return ModelDrafter("draft model", "model", target, draft, 0.0, **settings)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("kind", ["draft", "short draft", "EAGLE-3", "MTP", "DFlash", "DSpark"])
def test_drafters_hold_several_requests(kind, unified, tiny_target, tiny_draft, tiny_qwen35):
    """Drafts for all requests at once are as good as drafts for one, and cost as many evaluated tokens."""
    path = tiny_qwen35 if kind == "MTP" else tiny_target
    options = {"unified": unified, "n_snapshots": 4 if kind == "MTP" else 0, "load_mtp": kind == "MTP"}
    prompts, n_tokens, limits = some_prompts(), [40, 16, 25, 45], [4, 2, 4, 3]
    with opened(path, **options) as target, a_drafter(kind, target, tiny_draft) as drafter, Batch(target) as batch:
        batch.configure([(drafter, 4)])
        together = complete(batch, prompts, n_tokens, limits)
        n_together = drafter.n_evaluated
    assert_greedy(path, prompts, together)
    n_alone, matched = 0, []
    for i, prompt in enumerate(prompts):
        with (
            opened(path, **options, n_requests=1) as target,
            a_drafter(kind, target, tiny_draft) as drafter,
            Batch(target) as batch,
        ):
            batch.configure([(drafter, 4)])
            matched += [counters["matched"] for _, counters in complete(batch, [prompt], [n_tokens[i]], [limits[i]])]
            n_alone += drafter.n_evaluated
    assert [counters["matched"] for _, counters in together] == pytest.approx(matched, abs=3)
    # llama.cpp rounds the size of one request's context up, so its window is another; blocks are as long as the
    # longest.
    if kind not in ("short draft", "DFlash", "DSpark"):
        assert n_together == pytest.approx(n_alone, rel=0.02)


@pytest.mark.parametrize("model", ["tiny_target", "tiny_qwen35"])
def test_a_full_cache_loses_nothing(model, request):
    """There is room for two of the requests: the others wait."""
    path = request.getfixturevalue(model)
    prompts = [prompt * (90 // len(prompt)) for prompt in some_prompts()]
    with opened(path, n_ctx=256) as target, Batch(target) as batch:
        batch.configure([])
        assert_greedy(path, prompts, complete(batch, prompts, [40] * N_REQUESTS))


@pytest.mark.parametrize("unified", [True, False])
def test_a_common_prefix_is_shared(unified, tiny_target):
    """A copy of a whole stream of the cache, or of the cells' names, serves the requests that join later."""
    start = some_prompts()[1]
    prompts = [[*start, *range(100 + 10 * i, 103 + 10 * i)] for i in range(N_REQUESTS)]
    with opened(tiny_target, unified=unified) as target, Batch(target) as batch:
        batch.configure([])
        answers = complete(batch, prompts, [20] * N_REQUESTS)
        assert_greedy(tiny_target, prompts, answers)
        assert sum(counters["prefilled"] for _, counters in answers) < 2 * len(start)


def test_a_request_of_a_common_cache_has_a_limit(tiny_target):
    with opened(tiny_target, n_ctx=512, request_limit=40) as target, Batch(target) as batch:
        window = Window(0).config()
        with pytest.raises(ContextFullError, match="41 tokens and the context holds 40"):
            batch.slots[0].begin([5] * 41, Exact().nodes(), window)
        batch.slots[0].begin([5] * 38, Exact().nodes(), window)
        while (failure := batch.step()[0].failure) is None:
            pass
        assert isinstance(failure, ContextFullError) and "context of 40 tokens is full" in str(failure)
        assert len(batch.slots[0].history()) == 41
