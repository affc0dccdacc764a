"""One measured generation: what it counts, and that it is the base class's own text."""

from __future__ import annotations

import dataclasses

import pytest

from pyfly_cpp import MTP, Eagle3, PromptLookup
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding
from pyfly_cpp.decoding.resolve import Resolved, resolve
from pyfly_cpp.errors import IncompatibleDraftError
from pyfly_cpp.measure.generator import Generator, Prompt
from pyfly_cpp.measure.loaded import load_generator

MESSAGES = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples has he?"}]


def test_it_is_the_text_of_create_chat_completion(generator):
    prompt = generator.render(MESSAGES)
    llm = generator.llm
    generator.configure(PLAIN)
    expected = llm.create_chat_completion(messages=MESSAGES, max_tokens=60, temperature=0.0)
    for setting in (PLAIN, EXACT, Decoding.parse("exact lookup k=3")):
        got = generator.generate(prompt, setting, 60)
        assert got.text.strip() == expected["choices"][0]["message"]["content"].strip()
        assert len(got.tokens) + (got.finish == "eog") == got.stats.committed


def test_the_governor_is_of_adaptive_settings_and_keeps_what_it_knows(generator):
    prompt, adaptive = generator.render(MESSAGES), Decoding.parse("exact adaptive")
    governors = []
    for setting in (adaptive, EXACT, PLAIN, adaptive):
        got = generator.generate(prompt, setting, 40)
        assert (got.stats.governor is not None) == bool(setting.adaptive)
        if got.stats.governor is not None:
            governors.append(sum(got.stats.governor.rounds_at))
    first, second = governors
    assert second > first >= 10, "steps since the drafters were loaded, fixed ones not counted"


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


@pytest.mark.parametrize("settings", [[PLAIN, EXACT], [EXACT, PLAIN, EXACT]])
def test_a_head_has_seen_the_prompt_whoever_ran_before(tiny, settings):
    from pyfly_cpp import FlyLlama

    target, head = (tiny[0].with_name(f"tiny-llama-{name}-f16.gguf") for name in ("target", "eagle3"))
    if not head.exists():
        pytest.skip(f"{head.name} is not there")
    llm = FlyLlama(str(target), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    generator = Generator(llm, Resolved((PromptLookup(),), given=(Eagle3(str(head)),)))
    exact = Decoding.parse("exact eagle3")
    settings = [exact if setting == EXACT else setting for setting in settings]
    prompt = generator.render(MESSAGES)
    expected = generator.generate(prompt, exact, 40).stats
    n = generator.hold(prompt, settings)
    for setting in settings:
        generator.forget(n)
        stats = generator.generate(prompt, setting, 40).stats
        assert stats.prefilled == expected.prefilled, "the whole prompt"
        assert (
            setting.is_plain or abs(stats.matched - expected.matched) <= 2
        )  # but for the rounding of the head's batches
    llm.close()


def test_a_recurrent_model_starts_over(tiny):
    """Its state cannot be cut back to a shared prefix: prompts, in any order, give what a fresh model gives."""
    from pyfly_cpp import FlyLlama

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


def test_settings_that_cannot_be(generator, tiny):
    with pytest.raises(ValueError, match="lower k"):
        generator.require([Decoding.parse("exact k=100000")])
    with pytest.raises(ValueError, match=r"needs an EAGLE-3 head; write eagle3:FILE"):
        generator.require([Decoding.parse("exact eagle3")])
    with pytest.raises(IncompatibleDraftError, match="no MTP head"):
        generator.require([Decoding.parse("exact mtp")])
    with pytest.raises(ValueError, match=r"no model file .nowhere\.gguf"):
        generator.require([Decoding.parse("exact draft:nowhere.gguf")])
    with pytest.raises(ValueError, match="needs a draft model"):
        Generator(generator.llm).require([Decoding.parse("exact draft")])


def test_every_drafter_gives_the_same_text(generator, tiny):
    """Heads and draft models take turns on one target; with the exact gate the text is that of plain decoding."""
    head = tiny[0].with_name("tiny-llama-eagle3-f16.gguf")
    if not head.exists():
        pytest.skip(f"{head.name} is not there")
    prompt = generator.render(MESSAGES)
    expected = generator.generate(prompt, PLAIN, 40)
    texts = ["exact", f"exact eagle3:{head}", "exact lookup", f'exact k=5 "eagle3:{head}"', "exact both", "exact draft"]
    for setting in map(Decoding.parse, texts):
        got = generator.generate(prompt, setting, 40)
        assert got.tokens == expected.tokens, setting
        assert got.stats.drafted > 0
    generator.configure(PLAIN)
    generator.configure(Decoding.parse(texts[1]))
    generator.configure(PLAIN)
    assert generator.llm.drafter is None, "plain decoding pays for no head"


def test_the_models_own_head(tiny):
    path = tiny[0].with_name("tiny-qwen35-mtp-f16.gguf")
    if not path.exists():
        pytest.skip(f"{path.name} is not there")
    drafters = resolve(path)
    assert drafters.drafters == (MTP(),)
    settings = [PLAIN, EXACT, Decoding.parse("exact mtp k=5"), Decoding.parse("exact lookup")]
    arguments = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    heads = load_generator(path, drafters, settings, **arguments)
    prompt = heads.render(MESSAGES)
    texts = {heads.generate(prompt, setting, 40).tokens for setting in [*settings, *settings]}
    assert len(texts) == 1
    assert heads.generate(prompt, settings[2], 40).stats.replayed == 0, "loaded with room to roll back 5 tokens"
    heads.llm.close()
    plain = load_generator(path, drafters, [PLAIN], **arguments)
    with pytest.raises(ValueError, match="loaded without its MTP head"):
        plain.require([EXACT])
    plain.llm.close()


def test_steps(generator):
    setting = Decoding.parse("margin:1 reconverge")
    got = generator.generate(generator.render(MESSAGES), setting, 60)
    stats = got.stats
    assert len(got.steps) == stats.rounds > 1
    assert sum(r.drafted for r in got.steps) == stats.drafted
    for name in ("committed", "matched", "loose_accepted"):  # the last step may bring what nobody takes
        assert 0 <= sum(getattr(r, name) for r in got.steps) - getattr(stats, name) <= got.steps[-1].committed
    seconds = sum(r.seconds for r in got.steps)
    assert 0 < seconds <= got.seconds_prompt + got.decode_seconds
    assert all(r.drafted == 0 for r in generator.generate(generator.render(MESSAGES), PLAIN, 9).steps)
