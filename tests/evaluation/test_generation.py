"""One measured generation: what it counts, and that it is the base class's own text."""

from __future__ import annotations

import dataclasses

import pytest

from pyfly_cpp.evaluation.generation import Prompt
from pyfly_cpp.evaluation.settings import EXACT, PLAIN, parse_setting

MESSAGES = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples has he?"}]


def test_it_is_the_text_of_create_chat_completion(generator):
    prompt = generator.render(MESSAGES)
    llm = generator.llm
    generator.configure(PLAIN)
    expected = llm.create_chat_completion(messages=MESSAGES, max_tokens=60, temperature=0.0)
    for setting in (PLAIN, EXACT, parse_setting("exact lookup k=3")):
        got = generator.generate(prompt, setting, 60)
        assert got.text.strip() == expected["choices"][0]["message"]["content"].strip()
        assert len(got.tokens) + (got.finish == "eog") == got.stats.committed


def test_limits_and_stops(generator):
    prompt = generator.render(MESSAGES)
    whole = generator.generate(prompt, EXACT, 60)
    short = generator.generate(prompt, EXACT, 5)
    assert short.finish == "length" and short.tokens == whole.tokens[:5] and short.stats.committed == 5
    word = whole.text.split()[3]
    stopped = generator.generate(dataclasses.replace(prompt, stop=(word,)), EXACT, 60)
    assert stopped.finish == "stop" and stopped.text == whole.text[: whole.text.index(word)]
    with pytest.raises(ValueError, match="context"):
        generator.generate(Prompt(tuple([5] * 2000), ()), EXACT, 5)


def test_the_prefix_is_in_the_answers_mouth(generator):
    plain, prefixed = generator.render(MESSAGES), generator.render(MESSAGES, prefix="The answer")
    assert prefixed.tokens[: len(plain.tokens)] == plain.tokens
    assert generator.llm.detokenize(list(prefixed.tokens)).decode().endswith("The answer")


def test_speed_leaves_the_prompt_out(generator):
    generator.forget(0)
    got = generator.generate(generator.render(MESSAGES), EXACT, 40)
    stats = got.stats
    assert 0 < got.decode_tokens < stats.committed and got.decode_seconds > 0 and got.seconds_prompt > 0
    assert stats.seconds_verify <= got.decode_seconds + got.seconds_prompt


def test_a_shared_prefix_changes_nothing(generator):
    prompts = [generator.render([{"role": "user", "content": text}]) for text in ("One and two?", "One and three?")]
    n = generator.share_prefix(prompts)
    assert n > 0 and generator.llm.n_tokens == n
    generator.llm.reset()
    expected = [generator.generate(prompt, EXACT, 30).tokens for prompt in prompts]
    generator.share_prefix(prompts)
    for prompt, tokens in zip(prompts, expected):
        generator.forget(n)
        assert generator.generate(prompt, EXACT, 30).tokens == tokens


def test_a_recurrent_model_starts_over(tiny):
    """Its state cannot be cut back to a shared prefix: prompts, in any order, give what a fresh model gives."""
    from pyfly_cpp import FlyLlama
    from pyfly_cpp.evaluation.generation import Generator

    path = tiny[0].with_name("tiny-qwen35-mtp-f16.gguf")
    if not path.exists():
        pytest.skip(f"{path.name} is not there")
    texts = ["One and two?", "One and three?", "One and two?"]
    expected = []
    for text in texts:
        llm = FlyLlama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
        fresh = Generator(llm)
        expected.append(fresh.generate(fresh.render([{"role": "user", "content": text}]), PLAIN, 24).tokens)
        llm.close()
    llm = FlyLlama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    shared = Generator(llm)
    prompts = [shared.render([{"role": "user", "content": text}]) for text in texts]
    n = shared.share_prefix(prompts[:2])
    for prompt, tokens in zip(prompts, expected):
        shared.forget(n)
        for setting in (PLAIN, EXACT, PLAIN):
            assert shared.generate(prompt, setting, 24).tokens == tokens
    llm.close()


def test_settings_that_cannot_be(generator):
    with pytest.raises(ValueError, match="lower k"):
        generator.require([parse_setting("exact k=100000")])
    draft, generator.draft = generator.draft, None
    try:
        with pytest.raises(ValueError, match="needs a draft model"):
            generator.require([parse_setting("exact draft")])
    finally:
        generator.draft = draft


def test_sampling_is_seeded(generator):
    prompt = generator.render(MESSAGES)
    setting = parse_setting("exact")
    a, b, c = (generator.generate(prompt, setting, 30, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2))
    assert a == b != c
