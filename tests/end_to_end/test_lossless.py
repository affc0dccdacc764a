"""`Exact()` is lossless: greedy text is the target's own up to the noise of batched kernels, sampled text has the
target's own distribution, and no drafter, whatever it proposes, changes that."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from one_request import Engine
from scipy.stats import chi2, chi2_contingency
from teacher_forcing import gap, replay, rows_one_by_one, teacher_forcing_gap

from pyfly_cpp import DraftModel, Exact, FlyLlama, Margin, PromptLookup, Window
from pyfly_cpp._native import CallbackDrafter, ScriptedTarget
from pyfly_cpp.machine.threads import physical_cores

TOLERANCE = 1e-3
"""Logits; for the tiny F16 models."""

OPTIONS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
PROMPTS = [
    PROMPT,
    "Tom has 3 apples and 4 pears. He eats 2 apples.",
    "<|im_start|>user\nA robe takes 2 bolts of blue fiber and half that much white fiber.<|im_end|>\n"
    "<|im_start|>assistant\n",
]
CHATS = [  # whose answers are long
    "Repeat this list and add three more fruits: apple, banana, cherry, apple, banana, cherry, mango.",
    "Write a Python class for a binary search tree with insert, delete and search, and then tests for it.",
    "Write a dialogue of two old friends who meet again after forty years.",
    "List fifty animals, one on a line, with a short description of each.",
    "Write a long essay about the history of the printing press, with many paragraphs.",
    "Tell me a story about a lighthouse keeper who finds a message in a bottle.",
]


def drafters(draft, texts):
    yield PromptLookup(max_ngram_size=3, num_pred_tokens=8)
    yield DraftModel(draft, draft_max=7)
    yield LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=10)
    yield [PromptLookup(max_ngram_size=3, min_ngram_size=2), DraftModel(draft)]
    yield [PromptLookup(min_ngram_size=4, num_pred_tokens=8, texts=texts), PromptLookup(num_pred_tokens=6)]


@pytest.fixture(scope="module")
def texts(tiny_target, tmp_path_factory):
    """What the tiny model wrote before."""
    folder = tmp_path_factory.mktemp("texts")
    llm = llama_cpp.Llama(tiny_target, **OPTIONS)
    written = [prompt + llm(prompt, max_tokens=150, temperature=0)["choices"][0]["text"] for prompt in PROMPTS]
    (folder / "text").write_text("\n".join(written), encoding="utf-8")
    return [folder]


def chat_prompt(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def generate(llm, prompt, n, **settings):
    """(prompt and n new tokens, length of the prompt); goes on behind an end of text."""
    tokens = llm.tokenize(prompt.encode(), special=True)
    generator = llm.generate(tokens, **{"temp": 0.0, **settings})
    new = [next(generator) for _ in range(n)]
    generator.close()
    return tokens + new, len(tokens)


# ---- Greedy ----------------------------------------------------------------------------------------------------------


def check_lossless(fly, model_path, prompt, n, n_alone, n_threads=1):
    """(tokens checked, largest gap, noise): generates n tokens and checks that each is the argmax of the batch it came
    from, and (the first n_alone) within the noise of the argmax of a single-token evaluation. Logits."""
    fly.reset()
    fly.trace = True
    tokens, n_prompt = generate(fly, prompt, n)
    # A request that ends goes on behind its end; the draft behind that is in no record.
    n_new = next((i for i, t in enumerate(tokens[n_prompt:]) if llama_cpp.llama_vocab_is_eog(fly._model.vocab, t)), n)
    records = fly.records[:n_new]
    while n_new < n and records and records[-1].round == fly.records[n_new].round:
        records.pop()
    assert [r.token for r in fly.records] == tokens[n_prompt:]
    tokens = tokens[: n_prompt + len(records)]
    replayed = replay(model_path, tokens, n_prompt, records, OPTIONS["n_ctx"], n_threads)
    assert gap(replayed, tokens[n_prompt:]).max() == 0
    alone = rows_one_by_one(model_path, tokens[: n_prompt + n_alone], n_prompt, OPTIONS["n_ctx"], n_threads)
    noise = max(float(np.abs(a - b).max()) for a, b in zip(replayed, alone))
    gaps = gap(alone, tokens[n_prompt:])
    assert gaps.max() <= 2 * noise
    return len(records), float(gaps.max()), noise


@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("which", range(6), ids=["none", "lookup", "draft", "llama_cpp", "several", "texts"])
def test_greedy_on_the_tiny_model(which, adaptive, tiny_target, tiny_draft, texts, record_property):
    drafter = [None, *drafters(tiny_draft, texts)][which]
    fly = FlyLlama(tiny_target, drafter=drafter, adaptive=adaptive, **OPTIONS)
    for prompt in PROMPTS:
        n, largest_gap, noise = check_lossless(fly, tiny_target, prompt, 150, 150)
        record_property("largest_gap_and_noise", (largest_gap, noise))
        assert n > 20
        assert largest_gap <= TOLERANCE
        # The same without a look at steps, on the whole text:
        tokens, n_prompt = generate(fly, prompt, 150)
        assert teacher_forcing_gap(tiny_target, tokens, n_prompt).max() <= TOLERANCE
    assert which == 0 or adaptive or fly.stats.matched > 100


def check_many(model_path, plan, n, n_alone, n_threads, n_least, record_property):
    """Checks n tokens, n_least over all, for every question of every (drafter, questions) of the plan."""
    fly = FlyLlama(model_path, **{**OPTIONS, "n_threads": n_threads, "n_threads_batch": n_threads}, adaptive=False)
    results = {}
    for drafter, questions in plan:
        fly.drafter = drafter
        fly.reset_stats()
        for question in questions:
            results[f"{drafter}: {question[:20]}"] = check_lossless(
                fly, model_path, chat_prompt(question), n, n_alone, n_threads
            )
        assert fly.stats.matched > 20, drafter
    record_property("tokens_gap_noise", results)
    print(results)
    assert sum(n_checked for n_checked, _, _ in results.values()) >= n_least


@pytest.mark.slow
def test_greedy_on_smollm2(smollm2, record_property):
    """500 committed tokens on a real model (Q4_1), over three drafters. The draft model is the target's own file,
    with a p_min that varies the length of its drafts."""
    plan = [
        (PromptLookup(max_ngram_size=3, num_pred_tokens=8), CHATS[:3]),
        (LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=5), CHATS[3:5]),
        (DraftModel(smollm2, draft_max=6, p_min=0.3), CHATS[5:]),
    ]
    check_many(smollm2, plan, 130, 40, 1, 500, record_property)


@pytest.mark.model_1b5
def test_greedy_on_a_model_of_1b5(model_1b5, model_1b5_draft, record_property):
    """2,000 committed tokens; the kernels of K-quants differ most between batch sizes."""
    plan = [
        (PromptLookup(num_pred_tokens=7), CHATS[1:]),
        (DraftModel(model_1b5_draft, draft_max=7), CHATS[1:4]),
    ]
    check_many(model_1b5, plan, 300, 300, physical_cores(), 2000, record_property)


# ---- Sampled ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_frequencies_at_temperature(tiny_target, tiny_draft, record_property):
    """The first two tokens of many samples: Exact() with a drafter against the exact probabilities of the first, and
    against plain sampling for both."""
    n_samples, settings = 1500, {"temp": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    base = llama_cpp.Llama(tiny_target, logits_all=True, **OPTIONS)
    fly = FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, draft_max=2), **OPTIONS)
    p_values = {}
    for prompt in PROMPTS[:2]:
        tokens = base.tokenize(prompt.encode())
        base.reset()
        base.eval(tokens)
        p = np.exp(base.logits_to_logprobs(base.scores[len(tokens) - 1] / 0.8).astype(np.float64))

        def sample(llm, first_seed, tokens=tokens):
            pairs = []
            for seed in range(first_seed, first_seed + n_samples):
                llm.set_seed(seed)
                generator = llm.generate(tokens, **settings)
                pairs.append((next(generator), next(generator)))
                generator.close()
            return np.array(pairs)

        plain, fast = sample(base, 1), sample(fly, 1_000_001)
        p_values[prompt[:3], "first, exact"] = against_probabilities(fast[:, 0], p)
        p_values[prompt[:3], "first, plain"] = against_sample(fast[:, 0], plain[:, 0])
        both = [pairs[:, 0] * fly.n_vocab() + pairs[:, 1] for pairs in (fast, plain)]
        p_values[prompt[:3], "both, plain"] = against_sample(*both)
    assert fly.stats.matched > n_samples / 4  # drafts were accepted, not only rejected
    record_property("p_values", p_values)
    print(p_values)
    assert min(p_values.values()) > 0.001, p_values


def against_probabilities(tokens, p, at_least=10):
    """p-value of a chi-square test; tokens of less than `at_least` expected draws are one class."""
    common = np.flatnonzero(p * len(tokens) >= at_least)
    expected = np.append(p[common], 1 - p[common].sum()) * len(tokens)
    counts = np.array([(tokens == t).sum() for t in common])
    observed = np.append(counts, len(tokens) - counts.sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))


def against_sample(a, b, at_least=10):
    """p-value of a chi-square test that two samples have one distribution."""
    values, counts = np.unique(np.concatenate([a, b]), return_counts=True)
    table = [[(x == v).sum() for v in values[counts >= 2 * at_least]] for x in (a, b)]
    table = [[*row, len(x) - sum(row)] for row, x in zip(table, (a, b))]
    return float(chi2_contingency(table).pvalue)


class Chain:
    """The sampler chains that FlyLlama makes, for an engine without a llama target."""

    def __init__(self, path):
        self.llm = llama_cpp.Llama(path, **OPTIONS)

    def make(self, seed, **settings):
        self.llm.set_seed(seed)
        return self.llm._init_sampler(**settings)


SAMPLERS = {
    "defaults": {},
    "whole distribution": {"temp": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "unnormalised": {"temp": -1.0},
    "typical": {"typical_p": 0.6, "top_k": 0},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "greedy with penalties": {"temp": 0.0, "repeat_penalty": 1.3},
    "mirostat 1": {"mirostat_mode": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    "mirostat 2": {"mirostat_mode": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
}


@pytest.mark.parametrize("settings", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("gate", [Exact(), Margin(0.7)], ids=str)
def test_a_draft_does_not_disturb_the_sampler(settings, gate, tiny_target):
    """Without the noise of kernels (a scripted target): the tokens drawn with a drafter are those drawn without one,
    for every chain, also behind rollbacks: every window of the loose gate ends with a draft that is wrong."""
    n_vocab, never, chain = 1536, 1000, Chain(tiny_target)

    def row(history):
        rng = np.random.default_rng([*(int(t) for t in history[-2:])])
        out = np.full(n_vocab, -9.0, dtype=np.float32)
        out[:12] = rng.normal(scale=1.2, size=12)
        out[never] = -99.0
        return out

    n_rolled_back = 0

    def run(drafter, seed):
        nonlocal n_rolled_back
        sampler = chain.make(seed, **settings)
        with ScriptedTarget(row, n_vocab) as target, Engine(target) as engine:
            engine.configure(gate, Window(5), [(drafter, 6)] if drafter else [])
            engine.begin([3, 5], 0, sampler)
            out = []
            while len(out) < 60:
                engine.step()
                out += [token for _, token in engine.tokens()]
            n_rolled_back += engine.counters()["rolled_back"]
        return out[:60]

    class Draft:
        rng = np.random.default_rng(7)

        def __call__(self, history):
            out = list(history)
            for _ in range(5):
                top = np.argsort(-row(out))[:3]
                out.append(int(top[self.rng.choice(3, p=[0.7, 0.2, 0.1])]))
            return [*out[len(history) :], never]

    for seed in range(4):
        expected = run(None, seed)
        with CallbackDrafter(Draft()) as drafter:
            assert run(drafter, seed) == expected
    assert (n_rolled_back > 0) == (not gate.is_lossless)


# ---- Drafters that propose anything ----------------------------------------------------------------------------------


def random_tokens(rng, n_vocab):
    return lambda history: rng.integers(0, n_vocab, size=rng.integers(0, 12))


def vandal(history):
    history[:] = 7  # of a copy
    return history[:4]


ODD_DRAFTERS = {
    "one that writes to the history": vandal,
    "random": random_tokens(np.random.default_rng(1), 1536),
    "nothing": lambda history: [],
    "nothing, as an array": lambda history: np.array([], dtype=np.float64),
    "too long": lambda history: np.resize(history, 5000),
    "always the same": lambda history: [42] * 8,
    "control tokens": lambda history: [1533, 1534, 1535, 0, 1535],
    "end of text": lambda history: [1535] * 4,
    "64-bit": lambda history: np.asarray(history[-5:], dtype=np.int64),
    "unsigned": lambda history: np.asarray(history[:5], dtype=np.uint16),
    "not contiguous": lambda history: np.repeat(np.asarray(history), 2)[::2][-9:],
    "a tuple": lambda history: tuple(int(t) for t in history[:3]),
    "the history itself, reversed": lambda history: history[::-1],
}


@pytest.mark.parametrize("name", ODD_DRAFTERS)
def test_a_drafter_never_changes_the_text(name, tiny_target):
    base = llama_cpp.Llama(tiny_target, **OPTIONS)
    fly = FlyLlama(tiny_target, drafter=ODD_DRAFTERS[name], draft_max=9, **OPTIONS)
    for prompt in PROMPTS:
        expected = base(prompt, max_tokens=60, temperature=0)["choices"]
        assert fly(prompt, max_tokens=60, temperature=0)["choices"] == expected


def test_a_drafter_sees_the_whole_history(tiny_target):
    seen = []

    def watch(history):
        seen.append(np.array(history))
        return [int(history[0]), 5]

    fly = FlyLlama(tiny_target, drafter=watch, adaptive=False, **OPTIONS)
    tokens, n_prompt = generate(fly, PROMPT, 30)
    assert len(seen) >= 25
    for history in seen:
        assert history.dtype == np.intc and len(history) >= n_prompt
        assert history.tolist()[: len(tokens)] == tokens[: len(history)]


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        ([-1], "token -1.*outside.*vocabulary of 1536"),
        ([5, 1536], "token 1536.*outside.*vocabulary of 1536"),
        ([2**31 - 1], "outside.*vocabulary"),
        ([2**40], "32-bit"),
        ([1.5, 2.0], "drafter.*token ids"),
        (np.array([[1, 2], [3, 4]]), "drafter.*one-dimensional"),
        (["a"], "drafter.*token ids"),
        (np.array(["a"]), "drafter.*token ids"),
        ([None], "drafter.*token ids"),
        *((result, "the drafter's proposal must be") for result in (None, 5, "text")),
    ],
    ids=str,
)
def test_an_invalid_proposal(proposal, message, tiny_target):
    base = llama_cpp.Llama(tiny_target, **OPTIONS)
    expected = base(PROMPT, max_tokens=30, temperature=0)["choices"]
    calls = []

    def later(history):
        calls.append(len(history))
        return proposal if len(calls) == 3 else []

    fly = FlyLlama(tiny_target, drafter=later, adaptive=False, **OPTIONS)
    with pytest.raises(ValueError, match=message):
        fly(PROMPT, max_tokens=30, temperature=0)
    assert fly.n_tokens < 60
    assert fly(PROMPT, max_tokens=30, temperature=0)["choices"] == expected
    fly.drafter = PromptLookup()
    assert fly(PROMPT, max_tokens=30, temperature=0)["choices"] == expected


@pytest.mark.parametrize("exception", [RuntimeError, KeyError, KeyboardInterrupt, StopIteration, SystemExit])
def test_a_drafter_that_raises(exception, tiny_target):
    """Its own exception comes out, once; then the object goes on."""
    base = llama_cpp.Llama(tiny_target, **OPTIONS)
    expected = base(PROMPT, max_tokens=30, temperature=0)["choices"]
    failure = exception("mine")
    calls = []

    def fails(history):
        calls.append(1)
        if len(calls) == 4:
            raise failure
        return list(history[-3:])

    fly = FlyLlama(tiny_target, drafter=fails, adaptive=False, **OPTIONS)
    with pytest.raises((exception, RuntimeError)) as caught:
        fly(PROMPT, max_tokens=30, temperature=0)
    chain = [caught.value, caught.value.__cause__]  # a StopIteration leaves a generator as the cause of a RuntimeError
    assert failure in chain
    assert fly(PROMPT, max_tokens=30, temperature=0)["choices"] == expected
