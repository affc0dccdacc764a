"""Conversations and requests that begin alike: of each prompt only what is new is read, also by a model with a
recurrent state, which can go back to kept states alone. Answers are those of a model that has seen nothing else."""

from __future__ import annotations

import pickle

import pytest
from llama_cpp import LlamaRAMCache
from ten_turns import as_text, n_new, ten_turns

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama, PromptLookup

OPTIONS = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
SYSTEM = "You solve sums, and explain each step. " * 30
BEGIN = "<|im_start|>assistant\n<think>\n"
NEAR = 100
"""Tokens that may be read again: the beginning of an answer, and those behind the nearest state that was kept."""


@pytest.fixture(params=["attention", "hybrid"])
def model(request, tiny_target, tiny_qwen35):
    return {"attention": tiny_target, "hybrid": tiny_qwen35}[request.param]


@pytest.fixture
def fresh(model):
    """The greedy answer behind tokens, of an object that has seen nothing else."""

    def ask(tokens, n):
        with FlyLlama(model, n_ctx=4096, **OPTIONS) as llm:
            return llm(tokens, max_tokens=n, temperature=0)["choices"][0]["text"]

    return ask


class Session:
    """A conversation, message by message, and what was read for each answer."""

    def __init__(self, llm):
        self.llm = llm
        self.text = ""
        self.say("system", SYSTEM)

    def say(self, role, content):
        self.text += f"<|im_start|>{role}\n{content}<|im_end|>\n"

    def tokens(self, text):
        return self.llm.tokenize(text.encode(), add_bos=False, special=True)

    def answer(self, n=12):
        """Its tokens before, how many of them were read, and the answer."""
        prompt = self.tokens(self.text + BEGIN)
        self.llm.reset_stats()
        text = self.llm(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]
        return prompt, self.llm.stats.prefilled, text


def drafters(draft):
    return {"plain": None, "lookup and a draft model": [PromptLookup(), DraftModel(draft)]}


@pytest.mark.parametrize("drafter", ["plain", "lookup and a draft model"])
def test_a_template_leaves_out_earlier_thoughts(model, fresh, tiny_draft, drafter):
    with FlyLlama(model, n_ctx=4096, drafter=drafters(tiny_draft)[drafter], adaptive=False, **OPTIONS) as llm:
        session = Session(llm)
        n_before = 0
        for i in range(4):
            session.say("user", f"Tom has {i + 3} apples and buys {2 * i + 1} more. How many apples has Tom?")
            prompt, n_read, text = session.answer()
            assert n_read <= len(prompt) - n_before + NEAR, i
            assert text == fresh(prompt, 12), i
            n_before = len(prompt)
            session.say("assistant", "He has some.")  # without what it thought


def test_thoughts_stay_until_the_user_speaks_again(model, fresh):
    """As an agent calls its tools: each call goes behind the thoughts before it, and then all of them go."""
    with FlyLlama(model, n_ctx=4096, **OPTIONS) as llm:
        session = Session(llm)
        session.say("user", "How many apples are there?")
        before, n_first = session.text, len(session.tokens(session.text))
        for i in range(12):
            _, _, text = session.answer()
            session.text += BEGIN + text + "<|im_end|>\n"
            session.say("tool", f"There are {i} apples in basket {i}, and nothing else.")
        session.text = before
        session.say("assistant", "There are 66.")
        session.say("user", "And pears?")
        prompt, n_read, text = session.answer()
        assert n_read <= len(prompt) - n_first + NEAR
        assert text == fresh(prompt, 12)


def test_a_changed_middle_is_read_from_there(model):
    with FlyLlama(model, n_ctx=4096, **OPTIONS) as llm:
        prompt = [(i * 37) % 1400 + 30 for i in range(2000)]
        list(zip(range(4), llm.generate(prompt, temp=0.0)))
        for n_alike in (1700, 1700):  # the second time there is a state of just that place
            llm.reset_stats()
            next(llm.generate([*prompt[:n_alike], *[77] * 40], temp=0.0))
            n_read = llm.stats.prefilled
        assert n_read <= 40 + NEAR


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=str)
def test_ten_turns_of_chat_completions_read_what_is_new(model, tiny_target, drafter):
    """To the token, where the memory can be cut anywhere."""
    options = {"n_ctx": 2048, "chat_format": "chatml", **OPTIONS}
    ask = {"max_tokens": 8, "temperature": 0}
    with FlyLlama(model, drafter=drafter, adaptive=False, **options) as llm:
        before = []
        for i, (happened, messages) in enumerate(ten_turns()):
            prompt = llm.tokenize(as_text(messages).encode(), add_bos=True, special=True)
            llm.reset_stats()
            if i == 4:  # an answer that is left
                pieces = llm.create_chat_completion(messages, stream=True, **ask)
                next(pieces), next(pieces)
                pieces.close()
            else:
                answer = llm.create_chat_completion(messages, **ask)
                assert answer["usage"]["prompt_tokens"] == len(prompt)
            n_read = llm.stats.prefilled + llm.stats.replayed + 1  # and the last token, in a step
            n_least = n_new(prompt, before)
            assert n_read == n_least if model == tiny_target else n_read <= n_least + NEAR, happened
            before = prompt
    with FlyLlama(model, **options) as fresh:
        assert fresh.create_chat_completion(messages, **ask)["choices"] == answer["choices"]


def test_requests_that_begin_alike_read_that_once(model, fresh):
    prefix = [(i * 37) % 1400 + 30 for i in range(800)]
    prompts = [prefix + [50 + i] * 10 for i in range(8)]
    with FlyBatch(model, n_parallel=4, n_ctx=1024, **OPTIONS) as batch:
        handles = [batch.submit(prompt, max_tokens=6, temperature=0) for prompt in prompts]
        texts = [handle.result()["choices"][0]["text"] for handle in handles]
        assert batch.stats.prefilled <= 2 * len(prefix)
    assert texts == [fresh(prompt, 6) for prompt in prompts]


def read_for(llm, prompt):
    """Tokens that a request reads, and its answer."""
    llm.reset_stats()
    text = llm(prompt, max_tokens=8, temperature=0)["choices"][0]["text"]
    return llm.stats.prefilled, text


def test_a_saved_state_serves_the_same_prompt_and_others(model, fresh):
    prompt = [(i * 37) % 1400 + 30 for i in range(600)]
    turned = [*prompt[:580], *[90] * 30]
    with FlyLlama(model, n_ctx=1024, **OPTIONS) as llm:
        _, answer = read_for(llm, prompt)
        state = pickle.loads(pickle.dumps(llm.save_state()))
    for asked, answer_of in ((prompt, answer), (turned, fresh(turned, 8))):
        with FlyLlama(model, n_ctx=1024, **OPTIONS) as llm:
            llm.load_state(state)
            n_read, text = read_for(llm, asked)
            assert n_read <= 60
            assert text == answer_of


def test_a_cache_of_prompts_brings_an_earlier_one_back(model):
    first, second = ([(i * step) % 1400 + 30 for i in range(500)] for step in (37, 41))
    with FlyLlama(model, n_ctx=1024, **OPTIONS) as llm:
        llm.set_cache(LlamaRAMCache(1 << 30))
        _, answer = read_for(llm, first)
        read_for(llm, second)
        n_read, again = read_for(llm, first)
        assert n_read <= 1
        assert again == answer


def test_what_was_kept_of_another_text_is_not_saved(model, fresh):
    first, second = ([(i * step) % 1400 + 30 for i in range(600)] for step in (37, 41))
    with FlyLlama(model, n_ctx=1024, **OPTIONS) as llm:
        read_for(llm, first)
        llm.reset()
        llm.eval(second)
        state = llm.save_state()
        llm.load_state(state)
        turned = [*second[:580], *[90] * 30]
        assert read_for(llm, turned)[1] == fresh(turned, 8)


def test_requests_with_little_in_common_do_not_wait(model):
    prompts = [[*range(30, 70), *[(i * step) % 1400 + 30 for i in range(300)]] for step in (37, 41)]
    with FlyBatch(model, n_parallel=2, n_ctx=1024, **OPTIONS) as batch:
        for handle in [batch.submit(prompt, max_tokens=2, temperature=0) for prompt in prompts]:
            handle.result()
        assert batch.stats.prefilled <= sum(map(len, prompts))


def test_an_agent_among_others_reads_what_is_new(model, fresh):
    """In two slots, a title and a question behind the same system prompt between its turns, and a turn that is left."""

    def message(role, content):
        return batch.tokenize(f"<|im_start|>{role}\n{content}<|im_end|>\n".encode(), add_bos=False, special=True)

    def ask(prompt):
        handle = batch.submit(prompt, max_tokens=8, temperature=0)
        text = handle.result()["choices"][0]["text"]
        return handle.stats.prefilled, text

    with FlyBatch(model, n_parallel=2, n_ctx=2048, **OPTIONS) as batch:
        begin = batch.tokenize(BEGIN.encode(), add_bos=False, special=True)
        system = message("system", SYSTEM)
        history = system + message("user", "How many apples are there? " * 20)
        n_before = 0
        for i in range(5):
            prompt = history + begin
            if i == 2:
                batch.submit(prompt, max_tokens=200, temperature=0).cancel()
            n_read, text = ask(prompt)
            assert n_read <= len(prompt) - n_before + NEAR, i
            assert text == fresh(prompt, 8), i
            n_before = len(prompt)
            history += message("assistant", "I count.") + message("tool", f"There are {i} apples in basket {i}. " * 3)
            if i % 2:
                ask(message("system", f"A title. {i}") + begin)
            else:
                other = system + message("user", f"And pears, in basket {i}?" * 5)
                n_read, _ = ask(other + begin)
                assert n_read <= len(other) - len(system) + NEAR
