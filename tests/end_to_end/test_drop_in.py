"""`FlyLlama` is a drop-in `llama_cpp.Llama`: the same calls on both, with every kind of drafter, give the same results.

A case is a function of a model; what it returns is compared. The model is the tiny target in F32, with an F32 cache:
batched and single evaluation then agree to about 1e-5, so that texts can be compared, sampled ones too. (In F16 they
agree to 1e-3, which at a high temperature moves a draw now and then: the probabilities before it are summed up.)
"""

from __future__ import annotations

import html
import json
import pickle
import re
import shutil
import sys
import types
from collections import Counter

import llama_cpp
import numpy as np
import pytest
from heads import PROMPT, SHORT
from llama_cpp import (
    LlamaDiskCache,
    LlamaGrammar,
    LlamaRAMCache,
    LogitsProcessorList,
    StoppingCriteriaList,
    llama_chat_format,
)
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_cpp.llama_tokenizer import LlamaTokenizer

from pyfly_cpp import DraftModel, Entropy, Exact, FlyLlama, Margin, PromptLookup, Window
from pyfly_cpp.engine.recorded import Recorded
from pyfly_cpp.engine.stats import Record, Stats
from pyfly_cpp.errors import NotFiniteError
from pyfly_cpp.llama.prompting import render_chat

F32 = llama_cpp.GGML_TYPE_F32
OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "type_k": F32, "type_v": F32, "verbose": False}
MESSAGES = [{"role": "user", "content": "A robe takes 2 bolts of blue fiber and half that much white fiber. How many?"}]
CASES = {}


def case(name=None, base=None, **options):
    """Registers a case. `options` go to both constructors, `base` to the base class's alone."""

    def register(function):
        CASES[name or function.__name__] = (function, options, base or {})
        return function

    return register


@pytest.fixture(scope="module")
def target(tiny_target_f32):
    return tiny_target_f32


@pytest.fixture(params=["none", "lookup", "draft", pytest.param("llama_cpp", marks=pytest.mark.slow)])
def drafter(request, tiny_draft):
    """Constructor arguments of FlyLlama."""
    return {
        "none": {},
        "lookup": {"drafter": PromptLookup(max_ngram_size=3, num_pred_tokens=6), "adaptive": False},
        "draft": {"drafter": DraftModel(tiny_draft, draft_max=5)},
        "llama_cpp": {
            "draft_model": LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=7),
            "adaptive": False,
        },
    }[request.param]


_base_results = {}


@pytest.mark.alike
def test_same_as_the_base_class(case_name, drafter, target, tmp_path, lora):
    function, options, only_base = CASES[case_name]
    options = {**OPTIONS, **options}
    if "lora_path" in options:
        options["lora_path"] = lora
    if case_name not in _base_results:
        base = llama_cpp.Llama(target, **options, **only_base)
        base._tmp_path = tmp_path / "base"
        _base_results[case_name] = plain(function(base))
        base.close()
    fly = FlyLlama(target, **options, **drafter)
    fly._tmp_path = tmp_path / "fly"
    try:
        assert_same(plain(function(fly)), _base_results[case_name])
    finally:
        fly.close()


def pytest_generate_tests(metafunc):
    if "case_name" in metafunc.fixturenames:
        metafunc.parametrize("case_name", CASES)


def plain(value):
    """Without what differs from call to call."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ("id", "created")}
    if isinstance(value, types.GeneratorType):
        return [plain(v) for v in value]
    if isinstance(value, np.floating):
        return float(value)  # the base class's log-probabilities are of a type that json does not take
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def assert_same(a, b, path="result"):
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, list):
        assert len(a) == len(b), (path, a, b)
        for i in range(len(a)):
            assert_same(a[i], b[i], f"{path}[{i}]")
    elif isinstance(a, float):
        assert a == pytest.approx(b, abs=2e-3), path
    else:
        assert a == b, path


def text(response):
    return response["choices"][0]["text"]


def worded(chunks):
    """Chunks of a stream that say something: the base class also has an empty one for the token of a stop string."""
    return [chunk for chunk in chunks if text(chunk) or chunk["choices"][0]["finish_reason"]]


# ---- Completions -----------------------------------------------------------------------------------------------------


@case()
def completion(llm):
    return [llm(p, max_tokens=60, temperature=0) for p in (PROMPT, SHORT, "\u00e9\u4e16 \U0001f600 = ")]


@case()
def completion_of_tokens(llm):
    return llm(llm.tokenize(PROMPT.encode()), max_tokens=40, temperature=0)


@case()
def max_tokens(llm):
    return [llm(PROMPT, max_tokens=n, temperature=0) for n in (1, 2, 3, 17)]


@case("max_tokens_none_and_zero", n_ctx=256)
def max_tokens_none_and_zero(llm):
    bias = {llm.token_eos(): -100.0, llm.token_bos(): -100.0}  # never ends by itself
    return [llm(PROMPT, max_tokens=n, temperature=0, logit_bias=bias) for n in (None, 0, -1)]


@case()
def echo(llm):
    return llm(PROMPT, max_tokens=24, temperature=0, echo=True)


@case()
def suffix_infill(llm):
    return llm("def add(a, b):", suffix="return c", max_tokens=24, temperature=0)


@case("suffix_infill_spm", spm_infill=True)
def suffix_infill_spm(llm):
    return llm("def add(a, b):", suffix="return c", max_tokens=24, temperature=0)


@case()
def stop_strings(llm):
    whole = text(llm(PROMPT, max_tokens=60, temperature=0))
    stops = [whole[20:23], whole[-12:-8], "####", ["\n", "="], [whole[9:12], "nowhere"]]
    return [llm(PROMPT, max_tokens=60, temperature=0, stop=s) for s in stops]


@case()
def streaming(llm):
    return [
        llm(PROMPT, max_tokens=60, temperature=0, stream=True),
        worded(llm(PROMPT, max_tokens=60, temperature=0, stream=True, stop=["####", "Answer: The"])),
        llm("\u4e16\u754c\u4f60\u597d \u4e16\u754c", max_tokens=30, temperature=0, stream=True),
    ]


@case()
def streaming_joined(llm):
    chunks = list(llm(PROMPT, max_tokens=60, temperature=0, stream=True))
    whole = llm(PROMPT, max_tokens=60, temperature=0)
    assert "".join(text(c) for c in chunks) == text(whole)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    return whole


# ---- Chat ------------------------------------------------------------------------------------------------------------


@case()
def chat(llm):
    messages, answers = list(MESSAGES), []
    for question in ("And 3 robes?", "And how much of both?"):
        answer = llm.create_chat_completion(messages=messages, max_tokens=40, temperature=0)
        answers.append(answer)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": question}]
    return [*answers, llm.create_chat_completion(messages=messages, max_tokens=40, temperature=0)]


@case()
def chat_streaming(llm):
    return llm.create_chat_completion(messages=MESSAGES, max_tokens=40, temperature=0, stream=True)


@case("chat_logprobs", base={"logits_all": True})
def chat_logprobs(llm):
    return llm.create_chat_completion(messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3)


@case()
def chat_json_schema(llm):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "apples": {"type": "integer"}},
        "required": ["name", "apples"],
    }
    answer = llm.create_chat_completion(
        messages=MESSAGES, max_tokens=80, temperature=0, response_format={"type": "json_object", "schema": schema}
    )
    (choice,) = answer["choices"]
    found = json.loads(choice["message"].pop("content"))
    assert set(found) == {"name", "apples"}
    assert len(found["name"]) <= 12 and isinstance(found["apples"], int)
    return list(found), choice  # blanks, and so values, may differ


@case()
def chat_tools(llm):
    tool = {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
    choice = {"type": "function", "function": {"name": "add"}}
    answer = llm.create_chat_completion(
        messages=MESSAGES, tools=[tool], tool_choice=choice, max_tokens=40, temperature=0
    )
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call["id"] = ""
    for function in (call["function"], message["function_call"]):
        function["arguments"] = json.loads(function["arguments"])  # blanks may differ
    return message


@case("chat_logprobs_streaming", base={"logits_all": True})
def chat_logprobs_streaming(llm):
    options = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3, "stream": True}
    whole = text(llm(PROMPT, max_tokens=12, temperature=0))
    return [
        llm.create_chat_completion(messages=MESSAGES, **options),
        llm.create_chat_completion(messages=MESSAGES, stop=[whole[-4:] + "never", "."], **options),
    ]


# ---- What shapes the distribution ------------------------------------------------------------------------------------


@case()
def grammar(llm):
    gbnf = LlamaGrammar.from_string(
        'root ::= ("yes" | "no") ", " [0-9]+ " apples and " [a-z ]{4,30} "."', verbose=False
    )
    return [
        llm(PROMPT, max_tokens=40, temperature=0, grammar=gbnf),
        llm(PROMPT, max_tokens=40, temperature=0, grammar=gbnf),
        llm(PROMPT, max_tokens=40, temperature=0.9, seed=5, grammar=gbnf),
    ]


@case()
def logit_bias(llm):
    (the,) = llm.tokenize(b" the", add_bos=False)
    return [llm(PROMPT, max_tokens=40, temperature=0, logit_bias={the: b}) for b in (-100.0, 3.0)] + [
        llm(PROMPT, max_tokens=n, temperature=0, logit_bias=bias)
        for n, bias in ((40, {str(the): -2.0}), (5, {the: float("inf")}))
    ]


@case()
def logits_processor(llm):
    calls = []

    def stateless(input_ids, scores):
        calls.append(input_ids.tolist())
        scores = scores.copy()
        scores[input_ids[-1]] -= 5.0
        scores[[t for t in input_ids[-8:] if t % 3 == 0]] -= 2.0
        return scores

    answer = llm(PROMPT, max_tokens=30, temperature=0, logits_processor=LogitsProcessorList([stateless]))
    return [answer, calls]


@case()
def logits_processor_with_state(llm):
    class Ban:
        """Every third token may not be the favourite; the next two calls look at what was banned."""

        def __init__(self):
            self.n, self.banned, self.lengths = 0, [], []

        def __call__(self, input_ids, scores):
            self.n += 1
            self.lengths.append(len(input_ids))
            if self.n % 3 == 0:
                self.banned.append(int(scores.argmax()))
            scores[self.banned[-2:]] = -np.inf  # in place
            return scores

    ban = Ban()
    answer = llm(PROMPT, max_tokens=40, temperature=0, logits_processor=LogitsProcessorList([ban]))
    return [answer, ban.n, ban.banned, ban.lengths]


@case()
def logits_processors_chained(llm):
    def one(input_ids, scores):
        return scores * 0.5

    def two(input_ids, scores):
        return np.where(np.arange(len(scores)) % 7 == len(input_ids) % 7, scores - 4, scores)

    processors = LogitsProcessorList([one, two])
    answers = [llm(PROMPT, max_tokens=30, temperature=t, seed=1, logits_processor=processors) for t in (0, 0.7)]
    return [*answers, len(processors)]


@case()
def stopping_criteria(llm):
    seen = []

    def at_40(input_ids, logits):
        seen.append(input_ids.tolist())
        return len(input_ids) >= 40

    criteria = StoppingCriteriaList([at_40])
    answers = [
        llm(SHORT, max_tokens=60, temperature=0, stopping_criteria=criteria),
        llm(SHORT, max_tokens=5, temperature=0, stopping_criteria=criteria),
        list(llm(SHORT, max_tokens=60, temperature=0, stopping_criteria=criteria, stream=True)),
        llm(SHORT, max_tokens=60, temperature=0, stopping_criteria=at_40),
    ]
    return [answers, seen]


SAMPLERS = {
    "defaults": {},
    "top_k": {"top_k": 5, "top_p": 1.0, "min_p": 0.0},
    "top_k_1": {"top_k": 1},
    "top_p": {"top_k": 0, "top_p": 0.6, "min_p": 0.0},
    "min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
    "typical": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 0.5},
    "hot": {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "repeat_penalty": {"repeat_penalty": 1.4},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "presence_penalty": {"presence_penalty": 1.5},
    "penalties_greedy": {"temperature": 0, "repeat_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4},
    "mirostat_1": {"mirostat_mode": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
    "mirostat_2": {"mirostat_mode": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
}


def sampler_case(settings):
    def sampled(llm):
        answers = [llm(PROMPT, max_tokens=50, **{"temperature": 0.8, "seed": s, **settings}) for s in (1, 2, 1)]
        assert text(answers[0]) == text(answers[2])  # same seed, same text
        return answers

    return sampled


for _name, _settings in SAMPLERS.items():
    case(f"sampler_{_name}")(sampler_case(_settings))


@case("seed_of_the_model", seed=11)
def seed_of_the_model(llm):
    answers = [llm(PROMPT, max_tokens=30, temperature=0.9) for _ in range(2)]
    llm.set_seed(12)
    return [*answers, llm(PROMPT, max_tokens=30, temperature=0.9)]


@case("last_n_tokens_size", last_n_tokens_size=8)
def last_n_tokens_size(llm):
    return llm(PROMPT, max_tokens=50, temperature=0, repeat_penalty=1.5)


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


@case("logprobs", base={"logits_all": True})
def logprobs(llm):
    return [llm(PROMPT, max_tokens=20, temperature=0, logprobs=n) for n in (1, 5)] + [
        llm(PROMPT, max_tokens=20, temperature=0.8, seed=4, logprobs=3),
        llm("\u4e16\u754c", max_tokens=12, temperature=0, logprobs=2),
    ]


@case("logprobs_streaming", base={"logits_all": True})
def logprobs_streaming(llm):
    return [
        llm(PROMPT, max_tokens=20, temperature=0, logprobs=3, stream=True),
        worded(llm(PROMPT, max_tokens=60, temperature=0, logprobs=2, stream=True, stop=["####"])),
    ]


@case("logits_all", logits_all=True)
def logits_all(llm):
    answer = llm(PROMPT, max_tokens=20, temperature=0, logprobs=3)
    scores = np.array(llm.scores[: llm.n_tokens])
    return [answer, scores.shape[0], scores.argmax(axis=1).tolist(), scores.max(axis=1).astype(float).tolist()]


# ---- Sequences, states, caches ---------------------------------------------------------------------------------------


@case()
def prefix_reuse(llm):
    out = []
    for prompt in (PROMPT, PROMPT, PROMPT + " How many", SHORT, PROMPT[:40], PROMPT, PROMPT):
        answer = llm(prompt, max_tokens=25, temperature=0)
        out.append([answer, llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()])
    return out


@case()
def states(llm):
    first = llm(PROMPT, max_tokens=20, temperature=0)
    state = llm.save_state()
    other = llm(SHORT, max_tokens=20, temperature=0)
    llm.load_state(state)
    n, ids = llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()
    more = llm(PROMPT + text(first), max_tokens=20, temperature=0)
    llm.load_state(pickle.loads(pickle.dumps(state)))
    return [first, other, n, ids, more, llm(PROMPT, max_tokens=20, temperature=0), state.n_tokens, state.seed]


@case()
def ram_cache(llm):
    llm.set_cache(LlamaRAMCache(capacity_bytes=1 << 26))
    prompts = (PROMPT, SHORT, PROMPT, PROMPT + " How", SHORT)
    return [llm(p, max_tokens=20, temperature=0) for p in prompts] + [len(llm.cache.cache_state)]


@case()
def disk_cache(llm):
    llm.set_cache(LlamaDiskCache(str(llm._tmp_path)))
    answers = [llm(p, max_tokens=20, temperature=0) for p in (PROMPT, SHORT, PROMPT, PROMPT + " How")]
    return [*answers, list(llm(SHORT, max_tokens=20, temperature=0, stream=True))]


@case()
def reset(llm):
    first = llm(PROMPT, max_tokens=20, temperature=0)
    llm.reset()
    return [first, llm.n_tokens, llm(PROMPT, max_tokens=20, temperature=0)]


@case()
def generate(llm):
    tokens = llm.tokenize(PROMPT.encode())
    out, lengths = [], []
    for token in llm.generate(tokens, temp=0.0):
        out.append(token)
        lengths.append(llm.n_tokens)
        assert llm.eval_tokens[-1] == (out[-2] if len(out) > 1 else tokens[-1])
        if len(out) == 30:
            break
    return [out, lengths, list(llm.eval_tokens)]


@case()
def generate_behind_eval(llm):
    tokens = llm.tokenize(PROMPT.encode())
    llm.eval(tokens[:10])
    generator = llm.generate(tokens[10:], temp=0.0, reset=False)
    out = [next(generator) for _ in range(12)]
    generator.close()
    generator = llm.generate([out[-1]], temp=0.0, reset=False)  # goes on where it stopped
    out += [next(generator) for _ in range(12)]
    generator.close()
    return [out, list(llm.eval_tokens)]


@case()
def eval_and_sample(llm):
    llm.eval(llm.tokenize(PROMPT.encode()))
    out = []
    for _ in range(8):
        out.append(llm.sample(temp=0.0))
        llm.eval([out[-1]])
    rest = llm.generate([], temp=0.0, reset=False)
    out += [next(rest) for _ in range(8)]
    rest.close()
    return [out, list(llm.eval_tokens)]


@case()
def generation_past_end_of_text(llm):
    tokens = llm.tokenize(PROMPT.encode())
    generator = llm.generate(tokens, temp=0.0)
    out = [next(generator) for _ in range(90)]  # the model ends its text before that
    generator.close()
    assert llm.token_eos() in out or llm.token_bos() in out
    return out


# ---- Other models and contexts ---------------------------------------------------------------------------------------


@case("lora", lora_path="")
def with_lora(llm):
    return llm(PROMPT, max_tokens=40, temperature=0)


@case("lora_scaled", lora_path="", lora_scale=0.5)
def with_lora_scaled(llm):
    return llm(PROMPT, max_tokens=40, temperature=0)


@case("quantised_cache", type_k=llama_cpp.GGML_TYPE_Q8_0)
def quantised_cache(llm):
    return llm(PROMPT, max_tokens=40, temperature=0)


@case("quantised_cache_flash", type_k=llama_cpp.GGML_TYPE_Q8_0, type_v=llama_cpp.GGML_TYPE_Q8_0, flash_attn=True)
def quantised_cache_flash(llm):
    return llm(PROMPT, max_tokens=40, temperature=0)


@case("small_batches", n_batch=16, n_ubatch=8)
def small_batches(llm):
    return [llm(PROMPT + SHORT, max_tokens=30, temperature=0), llm(PROMPT, max_tokens=30, temperature=0)]


@case("embeddings", embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN)
def embeddings(llm):
    one = llm.create_embedding([PROMPT, SHORT])
    return [one, llm.embed(SHORT, normalize=True)]


@case("kv_overrides", kv_overrides={"tokenizer.ggml.add_bos_token": True})
def kv_overrides(llm):
    return llm(PROMPT, max_tokens=30, temperature=0)


@case()
def properties(llm):
    return [llm.n_ctx(), llm.n_vocab(), llm.n_embd(), llm.token_bos(), llm.token_eos(), llm.token_nl(), llm.metadata]


# ---- Where the base class is wrong, or has no counterpart ------------------------------------------------------------


def greedy(path, tokens, n, **options):
    """n tokens, each the argmax of a fresh single-token evaluation."""
    llm = llama_cpp.Llama(path, **{**OPTIONS, **options})
    llm.eval(tokens)
    out = []
    for _ in range(n):
        out.append(int(np.ctypeslib.as_array(llm._ctx.get_logits(), (llm.n_vocab(),)).argmax()))
        llm.eval(out[-1:])
    llm.close()
    return out


@pytest.mark.alike
@pytest.mark.parametrize("add_bos", [False, True])
def test_logprobs_with_echo(drafter, add_bos, target):
    """Every token is paired with the row before it. (Without BOS the base class pairs it with its own row.)"""
    options = {**OPTIONS, "kv_overrides": {"tokenizer.ggml.add_bos_token": add_bos}}
    n_prompt_text = PROMPT[:50]
    fly = FlyLlama(target, **options, **drafter)
    fly(PROMPT, max_tokens=4, temperature=0)  # the prompt lies in the cache; its rows are needed nevertheless
    answer = fly(n_prompt_text, max_tokens=15, temperature=0, echo=True, logprobs=4)
    found = answer["choices"][0]["logprobs"]
    tokens = fly.tokenize(n_prompt_text.encode(), add_bos=False)
    bos = [fly.token_bos()] if add_bos else []
    tokens += greedy(target, bos + tokens, answer["usage"]["completion_tokens"])
    base = llama_cpp.Llama(target, logits_all=True, **options)
    base.eval(bos + tokens)
    rows = base.logits_to_logprobs(base.scores[: base.n_tokens])
    assert found["tokens"] == [base.detokenize([t]).decode("utf-8", errors="ignore") for t in tokens]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for i in range(1, len(tokens)):
        row = rows[i - 1 + add_bos]
        assert found["token_logprobs"][i] == pytest.approx(float(row[tokens[i]]), abs=2e-3)
        assert max(found["top_logprobs"][i].values()) == pytest.approx(float(row.max()), abs=2e-3)
        assert 4 <= len(found["top_logprobs"][i]) <= 5
    assert found["text_offset"] == [len(base.detokenize(tokens[:i]).decode()) for i in range(len(tokens))]
    assert text(answer) == n_prompt_text + base.detokenize(tokens).decode()[len(n_prompt_text) :]


def test_the_earliest_stop_string_counts(drafter, target):
    """The base class takes the first of the list."""
    fly = FlyLlama(target, **OPTIONS, **drafter)
    tokens = [text(chunk) for chunk in fly(PROMPT, max_tokens=60, temperature=0, stream=True)]
    i = next(i for i, token in enumerate(tokens) if len(token) >= 5)
    stop = [tokens[i][3:5], tokens[i][1:3]]
    whole = "".join(tokens)
    cut = min(whole.index(string) for string in stop)
    answer = fly(PROMPT, max_tokens=60, temperature=0, stop=stop, logprobs=1)
    streamed = list(fly(PROMPT, max_tokens=60, temperature=0, stop=stop, stream=True))
    assert text(answer) == "".join(map(text, streamed)) == whole[:cut]
    assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == text(answer)
    assert {one["choices"][0]["finish_reason"] for one in (answer, streamed[-1])} == {"stop"}


def test_characters_of_several_tokens(drafter, target):
    """The base class leaves them out of log-probabilities and, where a stop string may begin, out of streams; and it
    goes on beyond max_tokens where they are not complete."""
    fly = FlyLlama(target, **OPTIONS, **drafter)
    character = "\u4e16".encode()
    expected = [token for token in fly.tokenize(character, add_bos=False) if fly.detokenize([token]) != b" "]
    assert len(expected) == 3 and fly.detokenize(expected) == character
    forced = LogitsProcessorList([lambda ids, scores: np.where(np.arange(len(scores)) == wanted(ids), scores, -np.inf)])

    def wanted(ids):
        return expected[(len(ids) - n_prompt) % 3]

    n_prompt = len(fly.tokenize(PROMPT.encode(), special=True))
    for n, result in ((6, "\u4e16" * 2), (5, "\u4e16"), (2, "")):
        options = {"max_tokens": n, "temperature": 0, "logits_processor": forced, "stop": ["\u4e16" * 2 + "!"]}
        answer = fly(PROMPT, logprobs=0, **options)
        assert text(answer) == "".join(map(text, fly(PROMPT, stream=True, **options))) == result
        assert answer["usage"]["completion_tokens"] == n
        assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == result
        assert "".join(map(text, fly(PROMPT, stream=True, logprobs=1, **options))) == result


def test_a_tokenizer_that_knows_texts_alone(target):
    """As that of transformers: what is half of a character decodes to U+FFFD."""

    class Texts(LlamaTokenizer):
        def detokenize(self, tokens, prev_tokens=None, special=False):
            before, whole = (
                super(Texts, self).detokenize(ids, special=special).decode("utf-8", "replace")
                for ids in (prev_tokens or [], [*(prev_tokens or []), *tokens])
            )
            return whole[len(before) :].encode()

    plain_fly = FlyLlama(target, **OPTIONS)
    fly = FlyLlama(target, tokenizer=Texts(plain_fly), **OPTIONS)
    prompt = "\u4e16\u754c\u4f60\u597d \u4e16\u754c"
    for options in ({"seed": 3, "temperature": 0.7}, {"temperature": 0, "stop": ["1"]}):
        wanted = text(plain_fly(prompt, max_tokens=30, **options))
        assert text(fly(prompt, max_tokens=30, **options)) == wanted
        assert "".join(map(text, fly(prompt, max_tokens=30, stream=True, **options))) == wanted


def test_a_tokenizer_of_a_kind_of_its_own_is_asked(target):
    class Loud(LlamaTokenizer):
        def detokenize(self, tokens, prev_tokens=None, special=False):
            return super().detokenize(tokens, prev_tokens, special).upper()

    texts = []
    for kind in (llama_cpp.Llama, FlyLlama):
        llm = kind(target, **OPTIONS)
        llm.tokenizer_ = Loud(llm)
        texts.append((text(llm(PROMPT, max_tokens=20, temperature=0)), llm.detokenize(llm.tokenize(b"a b"))))
    assert texts[0] == texts[1] and texts[0][0].isupper()


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_logits_processors_in_any_sequence(target, kind):
    def push(_, scores):
        scores[300] += 50
        return scores

    fly, base = FlyLlama(target, **OPTIONS), llama_cpp.Llama(target, **OPTIONS)
    given = {"max_tokens": 20, "temperature": 0}
    expected = text(base(PROMPT, logits_processor=LogitsProcessorList([push]), **given))
    assert text(fly(PROMPT, logits_processor=kind([push]), **given)) == expected
    assert text(fly(PROMPT, **given)) != expected


def test_a_seed_is_that_of_its_own_answer_when_answers_begin_in_another_order(target):
    fly = FlyLlama(target, **OPTIONS)
    given = {"max_tokens": 20, "temperature": 1.2}
    expected = [text(fly(PROMPT, seed=seed, **given)) for seed in (1, 2)]
    answers = [fly.write(PROMPT, seed=seed, **given) for seed in (1, 2)]
    assert ["".join(piece.text for piece in answer) for answer in answers] == expected


def test_a_state_of_the_cache_is_loaded_only_if_it_holds_more(target, monkeypatch):
    fly = FlyLlama(target, **OPTIONS)
    fly.set_cache(LlamaRAMCache())
    loaded = []
    load = fly.load_state
    monkeypatch.setattr(fly, "load_state", lambda state: loaded.append(state.n_tokens) or load(state))
    prompt = PROMPT
    for _ in range(3):
        prompt += text(fly(prompt, max_tokens=8, temperature=0)) + " And then?"
    assert not loaded
    fly(SHORT, max_tokens=4, temperature=0)
    fly(prompt, max_tokens=4, temperature=0)
    assert len(loaded) == 1


def test_counters_of_a_closed_model_and_of_a_part_of_its_life(target):
    with FlyLlama(target, drafter=PromptLookup(), **OPTIONS) as fly:
        fly(PROMPT, max_tokens=30, temperature=0)
        before = fly.stats
        fly(PROMPT, max_tokens=30, temperature=0)
        later, both = fly.stats.since(before), fly.stats
    assert fly.stats.committed == both.committed > 0
    assert sum(n for _, n in later.accepted_by_drafter) == later.matched + later.loose_accepted
    fly.reset_stats()
    assert fly.stats.committed == 0


def test_logit_bias_beside_a_processor(drafter, target):
    """The base class drops both when it is given both."""

    def push(_, scores):
        scores = scores.copy()
        scores[300] += 2
        return scores

    def both(_, scores):
        scores = push(_, scores)
        scores[400] += 3
        return scores

    processors = LogitsProcessorList([push])
    fly = FlyLlama(target, **OPTIONS, **drafter)
    found = [
        text(fly(PROMPT, max_tokens=30, temperature=0, logits_processor=processors, logit_bias={400: 3.0}))
        for _ in range(2)
    ]
    base = llama_cpp.Llama(target, **OPTIONS)
    expected = text(base(PROMPT, max_tokens=30, temperature=0, logits_processor=LogitsProcessorList([both])))
    assert found == [expected, expected]
    assert len(processors) == 1


@pytest.mark.parametrize("kind", ["raises", "forbids all"])
def test_a_processor_that_fails_behind_the_end_of_the_answer(kind, drafter, target):
    fly = FlyLlama(target, **OPTIONS, **drafter)
    words = fly.tokenize(PROMPT.encode())
    given = {"temperature": 0, "max_tokens": 40}
    expected = text(fly(PROMPT, **given))
    begin, stop = expected[:20], expected[20:22]  # where it ends
    assert stop not in begin
    asked = []

    def fail(tokens, scores):
        asked.append(len(tokens))
        if begin + stop not in fly.detokenize(tokens[len(words) :].tolist()).decode(errors="ignore"):
            return scores
        if kind == "raises":
            raise KeyError("behind")
        return np.full_like(scores, -np.inf)

    processors = LogitsProcessorList([fail])
    assert text(fly(PROMPT, stop=stop, logits_processor=processors, **given)) == begin
    n_before = asked[-1]
    pieces = []
    asked.clear()
    with pytest.raises(KeyError if kind == "raises" else NotFiniteError):
        for chunk in fly(PROMPT, stream=True, logits_processor=processors, **given):
            pieces.append(text(chunk))
    assert begin + stop in "".join(pieces)  # what came before the failure
    assert asked == sorted(set(asked)) and asked[-1] >= n_before


def test_tokens_sent_into_the_generator(drafter, target):
    fly = FlyLlama(target, **OPTIONS, **drafter)
    prompt, inserted = fly.tokenize(PROMPT.encode()), fly.tokenize(b" But wait.", add_bos=False)
    generator = fly.generate(prompt, temp=0.0)
    sequence = list(prompt)
    for n in (9, 1, 7):
        expected = greedy(target, sequence, n)
        found = [next(generator) if len(sequence) == len(prompt) else generator.send(inserted)]
        found += [next(generator) for _ in range(n - 1)]
        assert found == expected
        sequence += found + inserted
        assert list(fly.eval_tokens) == sequence[: -len(inserted) - 1]
    generator.close()
    assert text(fly(SHORT, max_tokens=20, temperature=0)) == text(
        llama_cpp.Llama(target, **OPTIONS)(SHORT, max_tokens=20, temperature=0)
    )


def test_penalties_know_what_was_generated_before_a_send(target, tiny_draft):
    """The sampler goes on with its history; a drafter does not change that."""
    texts = []
    for drafter in (None, PromptLookup(), DraftModel(tiny_draft)):
        fly = FlyLlama(target, drafter=drafter, adaptive=False, **OPTIONS)
        generator = fly.generate(fly.tokenize(PROMPT.encode()), temp=0.0, repeat_penalty=1.5, frequency_penalty=0.5)
        out = [next(generator) for _ in range(12)]
        out += [generator.send([10, 11])] + [next(generator) for _ in range(12)]
        generator.close()
        texts.append(out)
    assert texts[0] == texts[1] == texts[2]


def test_state_of_the_base_class(drafter, target):
    base = llama_cpp.Llama(target, **OPTIONS)
    first = base(PROMPT, max_tokens=20, temperature=0)
    state = base.save_state()
    expected = base(PROMPT + text(first), max_tokens=20, temperature=0)
    fly = FlyLlama(target, **OPTIONS, **drafter)
    fly.load_state(state)
    assert fly.n_tokens == state.n_tokens and fly._seed == state.seed
    fly.reset_stats()
    found = fly(PROMPT + text(first), max_tokens=20, temperature=0)
    assert text(found) == text(expected)
    assert fly.stats.prefilled <= 4  # the state was used, not evaluated again


def test_state_of_a_flyllama_in_the_base_class(drafter, target):
    fly = FlyLlama(target, **OPTIONS, **drafter)
    first = fly(PROMPT, max_tokens=20, temperature=0)
    state = fly.save_state()
    expected = fly(PROMPT + text(first), max_tokens=20, temperature=0)
    base = llama_cpp.Llama(target, **OPTIONS)
    base.load_state(state)
    assert base.n_tokens == state.n_tokens
    assert text(base(PROMPT + text(first), max_tokens=20, temperature=0)) == text(expected)


def test_a_cached_prompt_is_not_evaluated_again(drafter, target):
    fly = FlyLlama(target, **OPTIONS, **drafter)
    fly.set_cache(LlamaRAMCache())
    first = fly(PROMPT, max_tokens=20, temperature=0)
    fly(SHORT, max_tokens=20, temperature=0)
    fly.reset_stats()
    assert text(fly(PROMPT, max_tokens=20, temperature=0)) == text(first)
    assert fly.stats.prefilled == 0


def test_pickling(drafter, target):
    fly = FlyLlama(
        target, gate=Margin(0.2), window=Window(3), draft_max=4, protected=[7, 8], trace=True, **OPTIONS, **drafter
    )
    copy = pickle.loads(pickle.dumps(fly))
    assert isinstance(copy, FlyLlama)
    for name in ("gate", "window", "draft_max", "protected", "trace", "n_batch"):
        assert getattr(copy, name) == getattr(fly, name), name
    assert type(copy.drafter) is type(fly.drafter) and type(copy.draft_model) is type(fly.draft_model)
    assert copy.n_ctx() == fly.n_ctx()
    assert text(copy(PROMPT, max_tokens=30, temperature=0)) == text(fly(PROMPT, max_tokens=30, temperature=0))
    assert len(copy.scores) == copy.n_batch, "still without logits of all positions"


def test_from_pretrained(target, tmp_path, monkeypatch):
    """The base class's class method makes a FlyLlama and hands our arguments on."""
    folder = tmp_path / "hub"
    folder.mkdir()
    shutil.copy(target, folder / "tiny.gguf")
    hub, utils = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.utils")

    class HfFileSystem:
        def ls(self, repo_id, recursive):
            return [{"name": f"{repo_id}/tiny.gguf"}]

    hub.HfFileSystem = HfFileSystem
    hub.hf_hub_download = lambda **kwargs: str(folder / kwargs["filename"])
    utils.validate_repo_id = lambda repo_id: None
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    fly = FlyLlama.from_pretrained("somebody/tiny", "*.gguf", drafter=PromptLookup(), gate="margin:0.4", **OPTIONS)
    assert isinstance(fly, FlyLlama) and fly.drafter == PromptLookup() and fly.gate == Margin(0.4)
    assert fly(PROMPT, max_tokens=5, temperature=0)["usage"]["completion_tokens"] == 5


def test_settings_change_between_requests(target, tiny_draft):
    base = llama_cpp.Llama(target, **OPTIONS)
    expected = text(base(PROMPT, max_tokens=50, temperature=0))
    fly = FlyLlama(target, adaptive=False, **OPTIONS)

    def ask():
        fly.reset_stats()
        return text(fly(PROMPT, max_tokens=50, temperature=0))

    assert ask() == expected and fly.stats.drafted == 0
    for drafter in (PromptLookup(), DraftModel(tiny_draft), LlamaPromptLookupDecoding(2, 4), None, PromptLookup()):
        fly.drafter = drafter
        assert fly.drafter is drafter
        assert ask() == expected
        assert (fly.stats.drafted > 0) == (drafter is not None)
    fly.drafter = DraftModel(tiny_draft)
    for k in (1, 3, 12, 0, None):
        fly.draft_max = k
        assert ask() == expected
        assert len(fly.stats.drafted_at_depth) <= (8 if k is None else k)
        assert (fly.stats.drafted == 0) == (k == 0)
    fly.gate, fly.window = Entropy(0.0), Window(0)  # every draft stands
    loose = ask()
    assert fly.stats.loose_accepted > 0 and loose != expected
    fly.gate = Exact()
    assert ask() == expected and fly.stats.loose_accepted == 0


def test_draft_model_attribute(target):
    """The base class lets its drafter be replaced by assigning `draft_model`."""
    fly = FlyLlama(target, draft_model=LlamaPromptLookupDecoding(2, 4), adaptive=False, **OPTIONS)
    assert fly.drafter is fly.draft_model
    fly.draft_model = None
    fly(PROMPT, max_tokens=40, temperature=0)
    assert fly.drafter is None and fly.stats.drafted == 0
    fly.draft_model = LlamaPromptLookupDecoding(2, 4)
    fly(PROMPT, max_tokens=40, temperature=0)
    assert fly.stats.drafted > 0


def test_a_setting_changed_during_a_generation_counts_from_the_next(target):
    base = llama_cpp.Llama(target, **OPTIONS)
    expected = text(base(PROMPT, max_tokens=40, temperature=0))
    fly = FlyLlama(target, drafter=PromptLookup(), adaptive=False, **OPTIONS)
    chunks = []
    for chunk in fly(PROMPT, max_tokens=40, temperature=0, stream=True):
        fly.gate, fly.window, fly.draft_max = Entropy(0.0), Window(0), 3
        chunks.append(text(chunk))
    assert "".join(chunks) == expected


PARTS = (
    "{% for c in messages[0]['content'] %}{% if c['type'] == 'text' %}<{{ c['text'] | trim }}>{% endif %}{% endfor %}"
)
WHOLE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
MESSAGE = [{"role": "user", "content": [{"type": "text", "text": "Tom "}, {"type": "text", "text": " has 3"}]}]


@pytest.mark.parametrize(("template", "prompt"), [(PARTS, "<Tom><has 3>"), (WHOLE, "Tom  has 3")])
def test_parts_of_a_message_reach_a_template_that_reads_them(target, template, prompt):
    with FlyLlama(target, **OPTIONS) as llm:
        chat = llama_chat_format.Jinja2ChatFormatter(template, "", "").to_chat_handler()
        llm.chat_handler = chat
        assert render_chat(llm, llm.chat_arguments(MESSAGE)["messages"]).text == prompt


def test_a_formatter_of_ones_own_gets_the_messages_as_they_are(target):
    seen = []

    @llama_chat_format.register_chat_format("of-this-test")
    def own(messages, **_):
        seen.append(messages)
        return llama_chat_format.ChatFormatterResponse(prompt="Tom")

    with FlyLlama(target, chat_format="of-this-test", **OPTIONS) as llm:
        llm.create_chat_completion(MESSAGE, max_tokens=1)
    assert seen[-1] == MESSAGE  # loading looks at a conversation of its own


def test_a_handler_of_ones_own_gets_what_was_given(target):
    schema = {"type": "json_object", "schema": {"type": "object"}}
    grammar = LlamaGrammar.from_string('root ::= "x"', verbose=False)

    def handler(**given):
        return given

    with FlyLlama(target, chat_handler=handler, **OPTIONS) as llm:
        for form in (schema, {"type": "regex", "regex": "a+"}):
            given = llm.create_chat_completion("hi", response_format=form, grammar=grammar)
            assert (given["messages"], given["response_format"], given["grammar"]) == ("hi", form, grammar)


def test_a_text_without_tokens_has_no_embedding(target):
    with FlyLlama(target, embedding=True, **OPTIONS) as llm:
        llm.tokenize = lambda *_: []  # as of a model that adds no BOS
        for texts in ("", ["Tom", ""]):
            with pytest.raises(ValueError, match="tokens"):
                llm.embed(texts)


def test_a_token_that_a_stop_string_cuts_has_its_own_probability(target):
    with FlyLlama(target, **OPTIONS) as llm:
        options = {"max_tokens": 8, "temperature": 0, "logprobs": 3}
        whole = llm.create_completion("Tom has 3 apples", **options)["choices"][0]["logprobs"]
        i, text = next((i, text) for i, text in enumerate(whole["tokens"]) if i > 0 and len(text) > 2)
        cut = llm.create_completion("Tom has 3 apples", stop=[text[1:]], **options)["choices"][0]["logprobs"]
        n = len(cut["tokens"]) - 1
        assert n <= i and cut["top_logprobs"][n] == whole["top_logprobs"][n]


def test_arguments_that_llama_cpp_python_had_once_are_ignored(target):
    FlyLlama(target, f16_kv=True, n_parts=-1, **OPTIONS).close()


def test_attention_to_later_tokens_is_not_exact(target):
    with FlyLlama(target, attention_type=llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL, **OPTIONS) as llm:
        assert any("later" in reason for reason in llm.inexact)


def test_two_beginnings_of_a_prompt_of_tokens_are_warned_of(target):
    with FlyLlama(target, **OPTIONS) as llm:
        bos = llm.token_bos()
        with pytest.warns(RuntimeWarning, match="two BOS"):
            llm.create_completion([bos, bos, *llm.tokenize(b"Tom", add_bos=False)], max_tokens=1)


def test_a_text_in_place_of_messages_is_told(tiny_target):
    with FlyLlama(tiny_target, n_ctx=256, verbose=False) as llm:
        for wrong in ("hi", {"role": "user", "content": "hi"}):
            with pytest.raises(ValueError, match="list of messages"):
                llm.create_chat_completion(wrong)
        llm.create_completion("Tom", max_tokens=2)
        assert "<table>" in llm.stats._repr_html_() and "nan" not in llm.stats._repr_html_()
        assert "<table>" in Stats()._repr_html_() and "nan" not in Stats()._repr_html_()
        assert repr(Stats(rounds=2, seconds_draft=0.5)) == "Stats(rounds=2, seconds_draft=0.5)"
        assert "rounds=" in repr(llm.stats) and "governor" not in repr(llm.stats) and len(repr(llm.stats)) < 700
        assert str(llm.stats) == llm.stats.summary()
    with pytest.raises(ValueError, match="closed"):
        llm.create_completion("Tom")


def test_a_notebook_shows_how_an_answer_was_produced(tiny_target, tiny_draft):
    with FlyLlama(
        tiny_target, drafter=DraftModel(tiny_draft), gate=Margin(0.5), adaptive=False, trace=True, **OPTIONS
    ) as llm:
        assert llm.records == []
        answer = text(llm.create_completion(PROMPT, max_tokens=60, temperature=0))
        records = llm.records
        page = records._repr_html_()
        shown = re.sub(r"<del.*?</del>", "", page.partition("</div>")[0], flags=re.DOTALL)
        assert html.unescape(re.sub("<[^>]*>", "", shown)) == answer
        origins = Counter(record.origin for record in records)
        assert all(f"{n} {origin}" in page for origin, n in origins.items()) and origins["loose"] > 0
        assert page.count("<del") == 1 + sum(len(record.rejected) for record in records) > 1
        same = pickle.loads(pickle.dumps(records))
        assert same == records and type(same) is list
    assert isinstance(records._repr_html_(), (str, type(None))), "of a closed model"


def test_what_a_model_writes_is_no_markup_in_a_notebook():
    pieces = {0: b"<script>", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"\n<b>"}
    recorded = Recorded(pieces.__getitem__)
    assert recorded._repr_html_() is None
    for token, rejected in ((0, (3,)), (1, ()), (2, ())):
        recorded.append(Record(1, token, "target", token, 0, "gate", 0, 0.5, 1.0, -0.1, rejected))
    page = recorded._repr_html_()
    assert "<script" not in page and "<b>" not in page and "\n" not in page
    assert "&lt;script&gt;" in page and "↵&lt;b&gt;" in page and "é" in page and "90.5%" in page
