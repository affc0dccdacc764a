"""A model with a recurrent state (qwen35, hybrid memory): everything the base class does, with every drafter."""

from __future__ import annotations

import math

import llama_cpp
import pytest
from heads import PROMPT, SHORT
from llama_cpp import LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList

from pyfly_cpp import MTP, DraftModel, FlyLlama, PromptLookup
from pyfly_cpp.errors import NotFiniteError

OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(params=["none", "lookup", "draft", "head", pytest.param("callable", marks=pytest.mark.slow)])
def fly(request, tiny_qwen35, tiny_draft):
    settings = {
        "none": {},
        "lookup": {"drafter": PromptLookup()},
        "draft": {"drafter": DraftModel(tiny_draft)},
        "head": {"drafter": MTP(), "trace": True},
        "callable": {"drafter": lambda history: history[-3:]},
    }[request.param]
    llm = FlyLlama(tiny_qwen35, adaptive=False, **settings, **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def fresh(tiny_qwen35):
    """The greedy text behind a prompt, from a base class that has seen nothing else."""

    def ask(prompt, **settings):
        base = llama_cpp.Llama(tiny_qwen35, **OPTIONS)
        found = base(prompt, **{"max_tokens": 40, "temperature": 0, **settings})["choices"]
        base.close()
        return found

    return ask


def ask(llm, prompt, **settings):
    return llm(prompt, **{"max_tokens": 40, "temperature": 0, **settings})["choices"]


def test_same_as_the_base_class(fly, fresh):
    assert ask(fly, PROMPT) == fresh(PROMPT)
    assert (fly.stats.drafted > 0) == (fly.drafter is not None)
    assert ask(fly, PROMPT, temperature=0.8, seed=3) == fresh(PROMPT, temperature=0.8, seed=3)


def test_repeated_and_extended_prompts(fly, fresh):
    longer = PROMPT + ask(fly, PROMPT)[0]["text"]
    for prompt in (PROMPT, PROMPT, longer, SHORT, SHORT + " He", PROMPT[:30], PROMPT):
        assert ask(fly, prompt) == fresh(prompt), prompt


def test_an_extended_prompt_is_not_evaluated_again(fly):
    """What was generated is the state's own history: only what comes behind it is new."""
    tokens = fly.tokenize(PROMPT.encode())
    generator = fly.generate(tokens, temp=0.0)
    tokens += [next(generator) for _ in range(20)]
    generator.close()
    fly.reset_stats()
    next(fly.generate([*tokens, 300, 301], temp=0.0))
    assert fly.stats.prefilled <= 3


def test_a_stream_that_is_dropped(fly, fresh):
    stream = fly(PROMPT, max_tokens=40, temperature=0, stream=True)
    for _ in range(7):
        next(stream)
    del stream
    assert ask(fly, PROMPT) == fresh(PROMPT)
    assert ask(fly, SHORT) == fresh(SHORT)


def test_tokens_sent_into_the_generator(fly, fresh):
    tokens = fly.tokenize(PROMPT.encode())
    generator = fly.generate(tokens, temp=0.0)
    found = [next(generator) for _ in range(5)]
    sent = fly.tokenize(b" But wait.")
    continued = [generator.send(sent)] + [next(generator) for _ in range(9)]
    generator.close()
    expected = fresh([*tokens, *found, *sent], max_tokens=10)[0]["text"]
    assert fly.detokenize(continued, prev_tokens=[*tokens, *found, *sent]).decode(errors="ignore") == expected


def test_generation_behind_eval(fly, fresh):
    tokens = fly.tokenize(PROMPT.encode())
    fly.reset()
    fly.eval(tokens[:12])
    generator = fly.generate(tokens[12:], temp=0.0, reset=False)
    found = [next(generator) for _ in range(10)]
    generator.close()
    assert fly.detokenize(found, prev_tokens=tokens).decode(errors="ignore") == fresh(PROMPT, max_tokens=10)[0]["text"]


def test_evaluated_to_the_last_token(fly, fresh):
    """eval() of the whole prompt, then generate(reset=False): the row is there, the state cannot go back."""
    tokens = fly.tokenize(PROMPT.encode())
    fly.eval(tokens)
    generator = fly.generate([], temp=0.0, reset=False)
    found = [next(generator) for _ in range(10)]
    generator.close()
    assert fly.detokenize(found, prev_tokens=tokens).decode(errors="ignore") == fresh(PROMPT, max_tokens=10)[0]["text"]


@pytest.fixture
def seen():
    """seen(llm) evaluates a prompt, some of it as chat handlers do an image, and returns the ids that stand for it."""

    def see(llm):
        tokens = llm.tokenize(PROMPT.encode())
        llm.reset()
        llm.eval(tokens)
        llm.input_ids[4:12] = 0
        return llm.input_ids[: llm.n_tokens].tolist()

    return see


@pytest.fixture(scope="module")
def base(tiny_qwen35):
    llm = llama_cpp.Llama(tiny_qwen35, **OPTIONS)
    yield llm
    llm.close()


def test_what_no_token_ids_tell_is_not_evaluated_from_them(fly, base, seen):
    """The state cannot go back by one token to get its row again: the row that is there counts."""
    for settings in ({}, {"max_tokens": 1}, {"temperature": 0.8, "seed": 3}, {"stream": True}):
        assert _text(fly, seen(fly), settings) == _text(base, seen(base), settings)
    fly.reset_stats()
    ask(fly, seen(fly))
    assert fly.stats.prefilled <= 1


def _text(llm, prompt, settings):
    out = llm(prompt, **{"max_tokens": 40, "temperature": 0, **settings})
    return "".join(chunk["choices"][0]["text"] for chunk in (out if settings.get("stream") else [out]))


def test_processors_criteria_and_tokens_sent_behind_a_row_that_is_there(fly, base, seen):
    prompt, shown, stopped = seen(fly), [], []

    def process(tokens, scores):
        shown.append(tokens.tolist())
        return scores

    def stop(tokens, row):
        stopped.append((len(tokens), len(row)))
        return False

    ask(
        fly,
        prompt,
        logits_processor=LogitsProcessorList([process]),
        stopping_criteria=StoppingCriteriaList([stop]),
        max_tokens=3,
    )
    assert shown[0] == prompt and len(shown[1]) == len(prompt) + 1
    assert [n for n, _ in stopped][:3] == [len(prompt) + i for i in range(3)] and stopped[0][1] == fly.n_vocab()

    sent = fly.tokenize(b" But", add_bos=False)
    generator = fly.generate(seen(fly), temp=0.0)
    found = [next(generator), generator.send(sent), *(next(generator) for _ in range(8))]
    generator.close()
    expected = [next(base.generate(seen(base), temp=0.0))]
    base.eval([*expected, *sent])
    continued = base.generate(base.input_ids[: base.n_tokens].tolist(), temp=0.0)
    assert found == expected + [next(continued) for _ in range(9)]

    def fail(tokens, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ask(fly, seen(fly), logits_processor=LogitsProcessorList([fail]))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_row_that_is_there_and_no_token(fly, seen, temperature):
    """llama.cpp would end the process."""
    for grammar, error in (('"a" missing', ValueError), (r'"\x00"', NotFiniteError)):
        grammar = LlamaGrammar.from_string(f"root ::= {grammar}", verbose=False)
        with pytest.raises(error):
            ask(fly, seen(fly), grammar=grammar, temperature=temperature)
    for value, n in ((math.nan, None), (math.inf, None), (-math.inf, None), (math.nan, 1)):

        def process(tokens, scores, value=value, n=n):
            scores[:n] = value
            return scores

        for max_tokens in (1, 4):
            with pytest.raises(NotFiniteError):
                ask(fly, seen(fly), logits_processor=process, temperature=temperature, max_tokens=max_tokens)


def test_a_row_of_tokens_that_were_taken_back(fly, fresh):
    tokens = fly.tokenize(PROMPT.encode())
    fly.eval([*tokens, 300, 301])
    fly.n_tokens = len(tokens)
    assert ask(fly, tokens) == fresh(PROMPT)


def test_states_and_caches(fly, fresh):
    first = ask(fly, PROMPT)
    state = fly.save_state()
    ask(fly, SHORT)
    fly.load_state(state)
    assert ask(fly, PROMPT + first[0]["text"]) == fresh(PROMPT + first[0]["text"])
    fly.set_cache(LlamaRAMCache())
    for prompt in (PROMPT, SHORT, PROMPT, SHORT + " He"):
        assert ask(fly, prompt) == fresh(prompt), prompt


@pytest.mark.alike
def test_logprobs(fly, tiny_qwen35):
    base = llama_cpp.Llama(tiny_qwen35, logits_all=True, **OPTIONS)
    expected = ask(base, PROMPT, logprobs=2, max_tokens=12)[0]["logprobs"]
    found = ask(fly, PROMPT, logprobs=2, max_tokens=12)[0]["logprobs"]
    assert found["tokens"] == expected["tokens"]
    assert found["token_logprobs"] == pytest.approx([float(x) for x in expected["token_logprobs"]], abs=5e-3)
