"""`FlyBatch`: many requests at once, each as a `FlyLlama` serves it alone.

With the tiny target in F32, an F32 cache and without flash attention, the rows of a batch and of a request alone agree
to about 1e-5, so that texts and log-probabilities can be compared.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor

import llama_cpp
import numpy as np
import pytest
import random_models
from gguf_edit import edit_gguf
from heads import at_once
from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from teacher_forcing import teacher_forcing_gap

from pyfly_cpp import MTP, ContextFullError, DraftModel, FlyBatch, FlyLlama, Margin, Window
from pyfly_cpp.cli import in_options
from pyfly_cpp.machine import memory

F32 = llama_cpp.GGML_TYPE_F32
OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
EXACT = {**OPTIONS, "type_k": F32, "type_v": F32, "flash_attn": False}
GREEDY = {"temperature": 0, "max_tokens": 24}
PROMPTS = [
    "Natalia sold clips to 48 of her friends in April.",
    "Tom has 3 apples and 4 pears.",
    "def add(a, b):",
    "A robe takes 2 bolts of blue fiber. A robe takes 2 bolts of",
    "Once",
    "How many days are in 3 weeks?",
]
MESSAGES = [{"role": "user", "content": "A robe takes 2 bolts of blue fiber and half that much white fiber. How many?"}]
RULES = {"gate": Margin(2.0), "window": Window(2, rule="reconverge")}


def text_of(response):
    return response["choices"][0]["text"]


@pytest.fixture(scope="module")
def drafter(tiny_draft):
    return DraftModel(tiny_draft, draft_max=4)


@pytest.fixture(scope="module")
def batch(tiny_target_f32, drafter):
    """For the tests that leave it as it was."""
    with FlyBatch(tiny_target_f32, 4, drafter=drafter, **EXACT) as batch:
        yield batch


@pytest.fixture(scope="module")
def alone(tiny_target_f32, drafter):
    llm = FlyLlama(tiny_target_f32, drafter=drafter, **EXACT)
    yield llm
    llm.close()


@pytest.fixture
def plain(tiny_target):
    """A batch without a drafter, for tests of what happens around requests."""
    with FlyBatch(tiny_target, 2, **{**OPTIONS, "n_ctx": 2048}) as batch:
        yield batch


def endless(batch, **options):
    """A request that runs until its context is full, far longer than a test looks at it."""

    def unhurried(ids, scores):
        time.sleep(0.002)
        return scores

    options.setdefault("logits_processor", LogitsProcessorList([unhurried]))
    host = batch.llama
    ends = {host.token_eos(): -100, host.token_bos(): -100}
    return batch.submit("Once", max_tokens=None, temperature=0, logit_bias=ends, **options)


def new_threads():
    """Tells which threads have begun since."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


# ---- Each request is what it is alone --------------------------------------------------------------------------------


def same(a, b):
    """Two responses, but for their ids and times; log-probabilities within the noise."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"id", "created"}:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, float):
        assert a == pytest.approx(b, abs=1e-3)
    else:
        assert a == b


def test_a_model_without_a_graph_for_flash_attention(tmp_path):
    path = random_models.plm(tmp_path / "plm.gguf")
    with FlyBatch(path, 2, **OPTIONS) as batch:
        assert text_of(batch.submit("Once", **GREEDY).result())
    for make in (FlyBatch, FlyLlama):
        with pytest.raises(ValueError, match="leave out flash_attn=True") as failure:
            make(path, flash_attn=True, **OPTIONS)
        assert "lower --n-ctx or --n-batch, leave out --flash-attn, or let --verbose" in in_options(failure.value)


@pytest.mark.alike
@pytest.mark.parametrize("n_ctx", [256, 512])
def test_rope_scaling_goes_by_the_size_of_one_request(n_ctx, tiny_target_f32, tmp_path):
    """A model with two scalings, for contexts up to 256 tokens and longer ones (LongRoPE)."""
    n_pairs = 32

    def with_factors(arrays):
        arrays["rope_factors_short.weight"] = np.ones(n_pairs, dtype=np.float32)
        arrays["rope_factors_long.weight"] = np.full(n_pairs, 3, dtype=np.float32)

    fields = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 256}
    path = edit_gguf(tiny_target_f32, tmp_path / "longrope.gguf", fields, with_factors)
    options = {**EXACT, "n_ctx": n_ctx}
    alone = FlyLlama(path, **options)
    expected = [alone(prompt, logprobs=1, **GREEDY) for prompt in PROMPTS]
    alone.close()
    with FlyBatch(path, 4, **options) as batch:
        for found, wanted in zip(batch.complete(PROMPTS, logprobs=1, **GREEDY), expected):
            same(found["choices"], wanted["choices"])


def test_more_requests_than_slots(batch, alone):
    progress = []
    responses = batch.complete(PROMPTS * 2, on_progress=lambda *counts: progress.append(counts), **GREEDY)
    for prompt, response in zip(PROMPTS * 2, responses):
        same(response, alone.create_completion(prompt, **GREEDY))
    assert progress == [(n, 12) for n in range(1, 13)]


def digits_only(batch):
    """A processor that allows digits and spaces alone."""
    host = batch.llama
    allowed = [i for i in range(host.n_vocab()) if host.detokenize([i]).strip().isdigit()]

    def processor(ids, scores):
        out = np.full_like(scores, -np.inf)
        out[allowed] = scores[allowed]
        return out

    return LogitsProcessorList([processor])


REQUESTS = {
    "sampled": lambda _: (PROMPTS[0], {"temperature": 1.2, "seed": 5, "top_k": 30, "repeat_penalty": 1.2}),
    "mirostat": lambda _: (PROMPTS[1], {"mirostat_mode": 2, "seed": 6, "temperature": 0.9}),
    "stop": lambda _: (PROMPTS[0], {**GREEDY, "stop": ["How", "much"]}),
    "logprobs": lambda _: (PROMPTS[1], {**GREEDY, "logprobs": 3}),
    "echo": lambda _: (PROMPTS[3], {**GREEDY, "logprobs": 2, "echo": True}),
    "stream": lambda _: (PROMPTS[2], {**GREEDY, "stream": True}),
    "stream logprobs": lambda _: (PROMPTS[2], {**GREEDY, "stream": True, "logprobs": 1}),
    "grammar": lambda _: (
        PROMPTS[1],
        {**GREEDY, "grammar": LlamaGrammar.from_string('root ::= " yes" | " no" [a-z]+')},
    ),
    "processor": lambda batch: (PROMPTS[1], {**GREEDY, "logits_processor": digits_only(batch)}),
    "criteria": lambda _: (
        PROMPTS[0],
        {**GREEDY, "stopping_criteria": StoppingCriteriaList([lambda ids, row: len(ids) > 40])},
    ),
    "criterion": lambda _: (PROMPTS[0], {**GREEDY, "stopping_criteria": lambda ids, row: len(ids) > 40}),
    "bias": lambda _: (PROMPTS[5], {**GREEDY, "logit_bias": {50: 4.0, 60: 3.0}}),
    "tokens": lambda batch: (batch.tokenize(b"Tom has"), {**GREEDY}),
    "chat": lambda _: (MESSAGES, {**GREEDY}),
    "chat stream": lambda _: (MESSAGES, {**GREEDY, "stream": True}),
    "json": lambda _: (MESSAGES, {**GREEDY, "response_format": {"type": "json_object"}}),
    "one token": lambda _: (PROMPTS[0], {"temperature": 0, "max_tokens": 1}),
}


@pytest.mark.alike
def test_requests_of_all_kinds_at_once(batch, alone):
    def ask(name):
        prompt, options = REQUESTS[name](batch)
        is_chat = isinstance(prompt[0], dict)
        response = (alone.create_chat_completion if is_chat else alone.create_completion)(prompt, **options)
        return list(response) if options.get("stream") else response

    asked = {name: REQUESTS[name](batch) for name in REQUESTS}
    handles = {name: batch.submit(prompt, **options) for name, (prompt, options) in asked.items()}
    for name, handle in handles.items():
        same(handle.result(60), ask(name))


def test_rules_of_their_own(batch, alone):
    """Gate, window, draft length and trace are a request's."""
    settings = [{}, {**RULES, "trace": True}, {"draft_max": 0}, {"draft_max": 2, "trace": True}]
    handles = [batch.submit(PROMPTS[0], **of_request, **GREEDY) for of_request in settings]
    for handle, of_request in zip(handles, settings):
        alone.gate, alone.window = of_request.get("gate", "exact"), of_request.get("window")
        alone.draft_max, alone.trace = of_request.get("draft_max"), of_request.get("trace", False)
        alone.reset_stats()
        same(handle.result(60), alone.create_completion(PROMPTS[0], **GREEDY))
        assert [r.token for r in handle.records] == [r.token for r in alone.records] * alone.trace
        assert handle.stats.loose_accepted == alone.stats.loose_accepted
        assert handle.stats.drafted == alone.stats.drafted
    alone.gate, alone.window, alone.draft_max, alone.trace = "exact", None, None, False
    assert handles[1].stats.loose_accepted > 0


def test_pieces_of_requests_of_the_engine(batch, alone):
    prompt = alone.tokenize(PROMPTS[0].encode())
    expected = alone.create_completion(prompt, logprobs=2, echo=True, **{**GREEDY, "max_tokens": 8})["choices"][0]

    def ask(temp, **how):
        output = batch.llama.new_output(prompt, max_tokens=8, n_logprobs=2)
        wanted = batch.llama.new_request(prompt, output, n_prompt_logprobs=2, sampling={"temp": temp})
        return batch.write(wanted, **how)

    events = []
    handle = ask(0.0, trace=True, on_event=events.append)
    pieces = list(handle)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert alone.detokenize(prompt + [token.id for token in tokens]).decode() == expected["text"]
    assert [token.record for token in tokens] == handle.records
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[-1].stats is handle.stats and handle.stats.committed >= 8
    found = [own for own, _ in pieces[0].prompt] + [token.logprobs[0] for token in tokens]
    np.testing.assert_allclose(found, expected["logprobs"]["token_logprobs"][-len(found) :], atol=1e-4)
    assert events[0] == "begun" and events[-1] == "ended" and events.count("step") == handle.stats.rounds
    first, second = ([piece.text for piece in ask(1.5, seed=7)] for _ in range(2))
    assert first == second
    with pytest.raises(TypeError, match="nonsense"):
        batch.write(batch.llama.new_request(prompt, batch.llama.new_output(prompt), sampling={"nonsense": 1}))


def test_an_answer_that_is_ended_where_it_stands(plain):
    def ask():
        prompt = plain.tokenize(b"Once")
        return plain.write(plain.llama.new_request(prompt, plain.llama.new_output(prompt, ["no such text"])))

    running, waiting = endless(plain), [endless(plain), ask(), ask()]
    written = waiting[1]
    written.finish("length")  # before it begins
    assert [(piece.text, piece.finish) for piece in written] == [("", "length")]
    running.cancel()
    pieces = iter(waiting[2])
    first = next(pieces)
    waiting[2].finish("length")
    rest = list(pieces)
    assert (first.finish or rest[-1].finish) in ("length", "stop")
    waiting[2].finish("length")  # nothing more


def test_log_probabilities_of_a_prompt_that_begins_anew(tiny_target):
    """A request that makes room for others in the middle of its prompt."""

    def ask(n_cells):
        options, ready = {"n_batch": 32, "n_cells": n_cells, **OPTIONS, "n_ctx": 512}, threading.Event()
        with FlyBatch(tiny_target, 3, **options) as batch:
            prompts = [[300 + (7 * i + 13 * k) % 700 for i in range(300)] for k in range(3)]
            threading.Timer(1.0, ready.set).start()
            batch.between_steps(lambda: ready.wait(20))  # until all have come
            found = batch.complete(prompts, echo=True, logprobs=1, max_tokens=60, temperature=0)
            return [one["choices"][0]["logprobs"]["token_logprobs"] for one in found], batch.stats.prefilled

    expected, n_expected = ask(None)
    found, n_prefilled = ask(512)
    assert n_prefilled > n_expected
    for own, other in zip(expected, found):
        np.testing.assert_allclose(own[1:300], other[1:300], atol=0.02)


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"n": {}}}}}
    for name in ("count", "add")
]


@pytest.mark.parametrize("chat_format", ["chat_template.default", "chatml-function-calling"])
@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tools(chat_format, choice, stream, batch, alone, monkeypatch):
    """Whatever a chat format makes of them: some complete more than once."""

    def without_ids(told):
        if isinstance(told, dict):
            return {k: without_ids(v) for k, v in told.items() if k not in ("id", "created")}
        return [without_ids(v) for v in told] if isinstance(told, list) else told

    for llm in (batch.llama, alone):
        monkeypatch.setattr(llm, "chat_format", chat_format)
    options = {**GREEDY, "tools": TOOLS, "tool_choice": choice, "stream": stream}
    handle, expected = batch.submit(MESSAGES, **options), alone.create_chat_completion(MESSAGES, **options)
    assert without_ids(handle.result(60)) == without_ids(list(expected) if stream else expected)
    assert handle.stats.committed > 0
    cancelled = batch.submit(MESSAGES, **options)
    if cancelled.cancel():
        with pytest.raises(CancelledError):
            cancelled.result(5)


@pytest.mark.alike
def test_seeds_of_a_chain(tiny_target_f32):
    """Requests without a seed are as different as those of one FlyLlama, and the same."""
    options = {"temperature": 1.0, "max_tokens": 12}
    with FlyBatch(tiny_target_f32, 3, seed=3, **EXACT) as batch:
        texts = [text_of(response) for response in batch.complete(["Tom has"] * 5, **options)]
    llm = FlyLlama(tiny_target_f32, seed=3, **EXACT)
    assert texts == [text_of(llm.create_completion("Tom has", **options)) for _ in range(5)]
    assert len(set(texts)) > 1
    llm.close()


def test_a_grammar_that_takes_long_to_read_holds_up_nobody(plain, monkeypatch):
    """Seeds are taken in turn, samplers are made side by side."""
    may_end, new_sampler = threading.Event(), type(plain.llama).new_sampler

    def slow(llama, request, *seed):
        assert request.sampling["temp"] or may_end.wait(20)
        return new_sampler(llama, request, *seed)

    monkeypatch.setattr(type(plain.llama), "new_sampler", slow)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(plain.submit, "Tom", max_tokens=3, temperature=0)
        quick = pool.submit(plain.submit, "Tom", max_tokens=3, temperature=1)
        try:
            assert quick.result(10).result(10)
            assert not waiting.done()
        finally:
            may_end.set()
        assert waiting.result(10).result(10)


@pytest.mark.parametrize("kind", ["lookup", "MTP"])
def test_other_drafters_and_models(kind, tiny_target, tiny_qwen35):
    path, drafter = (tiny_qwen35, MTP()) if kind == "MTP" else (tiny_target, kind)
    with FlyBatch(path, 3, drafter=drafter, adaptive=False, **OPTIONS) as batch:
        handles = [batch.submit(prompt, trace=True, **GREEDY) for prompt in PROMPTS]
        for prompt, handle in zip(PROMPTS, handles):
            handle.result(60)
            tokens = batch.tokenize(prompt.encode(), special=True) + [record.token for record in handle.records]
            n_prompt = handle.records[0].position
            assert teacher_forcing_gap(path, tokens, n_prompt, 256).max() < 0.03
        assert batch.stats.drafted > 0


# ---- The batch -------------------------------------------------------------------------------------------------------


def test_common_beginnings_are_evaluated_once(plain):
    prompts = [PROMPTS[0] * 4 + end for end in (" a", " b", " c", " d")]
    n_alone = len(plain.tokenize(prompts[0].encode()))
    plain.complete(prompts, **GREEDY)
    assert plain.stats.prefilled < 2 * n_alone
    handle = plain.submit(prompts[0], **GREEDY)  # what an ended text left serves the next
    handle.result()
    assert handle.stats.prefilled <= 3


@pytest.mark.alike
def test_rows_of_a_common_beginning(batch, alone):
    """Whoever wants the rows of a prompt evaluates it."""
    prompts = [PROMPTS[0] * 3 + end for end in (" a", " b", " c")]
    options = {**GREEDY, "max_tokens": 4, "logprobs": 1, "echo": True}
    for prompt, response in zip(prompts, batch.complete(prompts, **options)):
        same(response, alone.create_completion(prompt, **options))


def test_counters(tiny_target, tiny_draft):
    with FlyBatch(tiny_target, 2, drafter=DraftModel(tiny_draft, draft_max=4), **OPTIONS) as batch:
        handles = [batch.submit(prompt, **GREEDY) for prompt in PROMPTS]
        n = [handle.result()["usage"]["completion_tokens"] for handle in handles]
        each = [handle.stats for handle in handles]
        assert all(stats.committed >= tokens for stats, tokens in zip(each, n))
        total = batch.stats
        assert total.committed == sum(stats.committed for stats in each)
        assert total.rounds == sum(stats.rounds for stats in each)
        assert [n for _, n in total.accepted_by_drafter] == [total.matched]
        batch.reset_stats()
        assert batch.stats.committed == 0
        batch.submit("Tom", **GREEDY).result()
        assert batch.stats.committed > 0


def test_no_token_that_nobody_wants(plain):
    """A request that ends, by whatever, is not decoded further."""
    for options in ({}, {"stop": ["a"]}, {"stopping_criteria": StoppingCriteriaList([lambda ids, _: len(ids) > 20])}):
        handle = plain.submit(PROMPTS[0], **GREEDY, **options)
        n = handle.result()["usage"]["completion_tokens"]
        assert n <= handle.stats.committed <= n + 1


def test_nobody_waits_for_a_reader(plain):
    streams = [plain.submit("Once", stream=True, **GREEDY) for _ in range(2)]
    assert text_of(plain.submit(PROMPTS[0], **GREEDY).result(20))
    assert all(stream.done() for stream in streams)


def test_a_prompt_is_reported(plain):
    seen = []
    prompt = PROMPTS[0] * 6
    with_chunks = {"on_prefill": lambda *counts: seen.append(counts), **GREEDY}
    with_rows = {"logprobs": 1, "echo": True}
    plain.submit(prompt, **with_chunks, **with_rows).result()
    assert seen and seen[-1][0] <= seen[-1][1]


def test_a_long_prompt_does_not_hold_up_a_running_request(tiny_target_f32, drafter):
    """Between two steps of another request, target and draft model read a few tokens of it where a step may take twice
    as long and no more, and batches of 512 where nothing says so. The answers are the same."""
    found = {}
    for longest_pause in (0, None):
        options = {**EXACT, "n_ctx": 1024, "longest_pause": longest_pause}
        with FlyBatch(tiny_target_f32, 2, drafter=drafter, adaptive=False, **options) as batch:
            prompt = (batch.tokenize(PROMPTS[3].encode()) * 60)[:700]
            n_read, seen = [0], []

            def look(ids, scores, drafts=batch.model.decoder.drafters[0], n_read=n_read, seen=seen):
                seen.append((n_read[0], drafts.n_evaluated))
                return scores

            running = endless(batch, stream=True, logits_processor=LogitsProcessorList([look]))
            next(iter(running))
            joining = batch.submit(
                prompt, on_prefill=lambda n, n_all, n_read=n_read: n_read.__setitem__(0, n), **GREEDY
            )
            answer = text_of(joining.result())
            running.cancel()
            by_target, by_draft = (max(b - a for a, b in zip(counts, counts[1:])) for counts in zip(*seen))
            found[longest_pause] = by_target, by_draft, answer
    assert 8 <= found[0][0] <= 128 and found[0][1] <= 128, found
    assert found[None][0] == 512 <= found[None][1], found
    assert found[0][2] == found[None][2]


# ---- Handles ---------------------------------------------------------------------------------------------------------


def test_a_stream_comes_while_it_is_made(plain):
    handle = endless(plain, stream=True)
    chunks = iter(handle)
    assert all(text_of(next(chunks)) is not None for _ in range(3))
    assert not handle.done()
    handle.cancel()
    with pytest.raises(CancelledError):
        list(chunks)


def test_a_stream_can_be_read_twice(plain):
    handle = plain.submit(PROMPTS[0], stream=True, **GREEDY)
    assert list(handle) == list(handle) == handle.result()
    handle = plain.submit(PROMPTS[0], **GREEDY)
    assert list(handle) == [handle.result()]


def test_cancel_from_another_thread(plain):
    running, other, waiting = endless(plain), endless(plain), plain.submit("Tom", **GREEDY)
    threading.Thread(target=running.cancel).start()
    with pytest.raises(CancelledError, match="cancelled"):
        running.result(20)
    assert not running.cancel()
    assert text_of(waiting.result(20)), "its slot is free"
    assert not other.done()
    queued = [endless(plain) for _ in range(3)]
    assert queued[-1].cancel() and not queued[-1].cancel()
    assert isinstance(queued[-1].exception(), CancelledError)


def test_nothing_is_left_of_a_request_whose_failure_was_read(plain):
    """The failure has the frames that it was raised in, and these have the handle."""
    handles = [endless(plain), plain.submit("Tom", **GREEDY)]
    handles[0].cancel()
    with pytest.raises(CancelledError):
        handles[0].result()
    handles[1].result()
    left = [weakref.ref(handle) for handle in handles]
    del handles
    gc.collect()
    assert [handle() for handle in left] == [None, None]


def test_cancel_of_a_chat_whose_handler_has_just_begun(tiny_target):
    """Its handler, in a thread of its own, asks for a completion at any time."""
    options = {**OPTIONS, "n_ctx": 2048, "chat_format": "chatml-function-calling"}
    with FlyBatch(tiny_target, 2, **options) as batch:

        def unhurried(ids, scores):
            time.sleep(0.02)
            return scores

        no_end = {"max_tokens": 1900, "temperature": 0, "logit_bias": {batch.llama.token_eos(): -100}}
        no_end["logits_processor"] = LogitsProcessorList([unhurried])
        messages = [{"role": "user", "content": "hi " * 300}]
        for i in range(20):
            handle = batch.submit(messages, stream=True, **no_end)
            time.sleep(0.0007 * (i % 5))
            handle.cancel()
            time.sleep(0.1)
            deadline = time.monotonic() + 15  # the answer would take twice as long
            while batch.between_steps(lambda: len(batch._stepper._running)).result(20):
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_timeout_leaves_the_request_alone(plain):
    handle = endless(plain)
    with pytest.raises(TimeoutError if sys.version_info >= (3, 11) else Exception):
        handle.result(timeout=0.01)
    assert not handle.done()


def test_a_dropped_handle_frees_its_slot(plain):
    for _ in range(6):
        endless(plain)
        for _ in endless(plain, stream=True):
            break
    gc.collect()
    assert text_of(plain.submit("Tom", **GREEDY).result(20))


def test_the_handle_keeps_the_batch(tiny_target):
    handle = FlyBatch(tiny_target, 1, **OPTIONS).submit("Tom", **GREEDY)
    gc.collect()
    assert text_of(handle.result(20))


def test_asyncio(plain):
    async def main():
        stream = plain.submit(PROMPTS[0], stream=True, **GREEDY)
        texts = await asyncio.gather(*(plain.submit(prompt, **GREEDY) for prompt in PROMPTS))
        streamed = [text_of(chunk) async for chunk in stream]
        with pytest.raises(ValueError, match="invalid literal"):
            await plain.submit("Tom", logit_bias={"x": 1}, **GREEDY)
        slow = endless(plain)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(wait_for(slow)), 0.05)
        assert isinstance(slow.exception(5), CancelledError), "the task that waited was cancelled"
        return texts, "".join(streamed)

    async def wait_for(handle):
        return await handle

    texts, streamed = asyncio.run(main())
    assert streamed == text_of(texts[0])
    assert [text_of(t) for t in texts] == [text_of(t) for t in plain.complete(PROMPTS, **GREEDY)]


def test_many_threads(plain):
    """Each gets its own answer."""
    expected = [text_of(response) for response in plain.complete(PROMPTS, **GREEDY)]
    found = {}

    def ask(i):
        found[i] = text_of(plain.submit(PROMPTS[i % 6], **GREEDY).result(60))

    at_once(ask, range(18))
    assert found == {i: expected[i % 6] for i in range(18)}


# ---- Failures --------------------------------------------------------------------------------------------------------


def test_a_failure_is_its_own(plain):
    def broken(ids, scores):
        raise KeyError("mine")

    def never(ids, row):
        raise OSError("me too")

    expected = text_of(plain.submit("Tom", **GREEDY).result())
    bad = [
        (plain.submit("Tom", logits_processor=LogitsProcessorList([broken]), **GREEDY), KeyError, "mine"),
        (plain.submit("Tom", stopping_criteria=StoppingCriteriaList([never]), **GREEDY), OSError, "me too"),
        (plain.submit([5, 10**6], **GREEDY), ValueError, "outside the vocabulary"),
        (plain.submit([], **GREEDY), ValueError, "prompt is empty"),
        (plain.submit(PROMPTS[0] * 200, **GREEDY), ContextFullError, "window of 2048, the answer included; shorten"),
    ]
    good = plain.submit("Tom", **GREEDY)
    for handle, kind, message in bad:
        with pytest.raises(kind, match=message):
            handle.result(20)
    assert text_of(good.result(20)) == expected


@pytest.mark.parametrize("when", ["begun", "prompt", "step", "ended"])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_failure_of_a_callback_of_events_is_its_own(when, is_finished, plain):
    def fails(event):
        if event == when:
            raise KeyError("mine")

    good = plain.submit("Tom", **GREEDY)
    prompt = plain.tokenize(b"Once a day " * 300)
    request = plain.llama.new_request(prompt, plain.llama.new_output(prompt, max_tokens=500), sampling={"temp": 0.0})
    bad = plain.write(request, on_event=fails)
    if is_finished:
        bad.finish("length")
    assert is_finished or isinstance(bad.exception(20), KeyError)
    assert text_of(good.result(20)) and text_of(plain.submit("Tom", **GREEDY).result(20))


@pytest.mark.parametrize("is_split", [False, True])
def test_a_failure_of_a_drafter_is_that_of_its_request(is_split, tiny_target):
    """Of two requests that fail in one step, whichever of two drafters fails for which."""

    def fails_for(seconds):
        def fails(ids):
            if len(ids) > 8 and ids[1] in seconds:
                raise KeyError(int(ids[1]))
            return []

        return fails

    drafters = [fails_for({50}), fails_for({20})] if is_split else fails_for({20, 50})
    with FlyBatch(tiny_target, 2, drafter=drafters, adaptive=False, **OPTIONS) as batch:
        ready = threading.Event()
        batch.between_steps(lambda: ready.wait(20))
        handles = {second: batch.submit([1, second, 3, 4], max_tokens=30) for second in (20, 50)}
        ready.set()
        for second, handle in handles.items():
            failure = handle.exception(20)
            assert isinstance(failure, KeyError) and failure.args == (second,)


def test_a_failure_of_complete(plain):
    prompts = ["Tom", [10**6], "Once"]
    found = plain.complete(prompts, return_exceptions=True, **GREEDY)
    assert isinstance(found[1], ValueError) and text_of(found[0]) and text_of(found[2])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        plain.complete(prompts, **GREEDY)
    with pytest.raises(ZeroDivisionError):
        plain.complete(["Tom"] * 4, on_progress=lambda n, n_all: 1 // 0, **GREEDY)
    assert text_of(plain.submit("Tom", **GREEDY).result(20))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"temprature": 1}, TypeError, "temprature"),
        ({"gate": "sometimes"}, ValueError, "gate"),
        ({"window": 3}, ValueError, "window must be"),
        ({"draft_max": -1}, ValueError, "draft_max must be"),
        ({"draft_max": 10**6}, ValueError, "lower draft_max"),
        ({"prompt": 5}, ValueError, "a prompt is a string"),
        ({"prompt": [1, "x"]}, ValueError, "a prompt is a string"),
    ],
)
def test_bad_requests(plain, options, kind, message):
    with pytest.raises(kind, match=message):
        plain.submit(**{"prompt": "Tom", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_parallel": 0}, "n_parallel must be an integer in 1..256, not 0"),
        ({"n_parallel": 2.5}, "n_parallel must be an integer"),
        ({"n_parallel": True}, "n_parallel must be an integer"),
        ({"n_parallel": 257}, "in 1..256"),
        ({"n_ctx": -1}, "n_ctx must be"),
        ({"n_cells": 100}, "n_cells must be an integer >= 256"),
        ({"n_chunk": 0}, "n_chunk must be"),
        ({"longest_pause": -1}, "longest_pause must be"),
        ({"longest_pause": "short"}, "longest_pause must be a number"),
        ({"embedding": True}, "use a FlyLlama with embedding=True"),
        ({"n_paralel": 2}, "FlyBatch has no argument 'n_paralel'. Did you mean 'n_parallel'"),
    ],
)
def test_bad_arguments(tiny_target, options, message):
    with pytest.raises(ValueError, match=message):
        FlyBatch(tiny_target, **{**OPTIONS, "n_parallel": 4, **options})


def test_more_than_a_cache_holds(tiny_target):
    with pytest.raises(ValueError, match="more than a cache can hold; lower n_ctx") as failure:
        FlyBatch(tiny_target, 4, **{**OPTIONS, "n_ctx": 2**30})
    assert in_options(failure.value).endswith("lower --n-ctx.")


def test_more_than_fits_in_memory(tiny_target, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 2 * 10**7)
    with pytest.raises(ValueError, match=r"64 requests of 4096 tokens .* and 20.0 MB are free: each .* lower"):
        FlyBatch(tiny_target, 64, **{**OPTIONS, "n_ctx": 4096})


def test_the_context_it_was_trained_on(tiny_target):
    with FlyBatch(tiny_target, 2, **{**OPTIONS, "n_ctx": 0}) as batch:
        assert batch.n_ctx >= 256 and batch.n_parallel == 2
        assert text_of(batch.submit("Tom", **GREEDY).result())


# ---- The end ---------------------------------------------------------------------------------------------------------


def test_close_while_requests_run(tiny_target):
    threads = new_threads()
    batch = FlyBatch(tiny_target, 2, **OPTIONS)
    handles = [endless(batch) for _ in range(5)]
    while not handles[0].stats.committed:
        time.sleep(0.01)
    batch.close()
    batch.close()
    for handle in handles:
        assert isinstance(handle.exception(5), CancelledError)
    assert batch.stats.committed > 0
    with pytest.raises(ValueError, match="this FlyBatch is closed"):
        batch.submit("Tom")
    with pytest.raises(ValueError, match="this FlyBatch is closed"):
        batch.tokenize(b"Tom")
    assert not threads()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt, options",
    [
        ("Tom has 3", {"logprobs": 3}),
        ([300, 301, 302], {"logprobs": 3, "echo": True}),
        (MESSAGES, {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_what_has_finished_is_told_after_close(prompt, options, stream, tiny_target):
    with FlyBatch(tiny_target, 2, **OPTIONS) as batch:
        read, unread = (batch.submit(prompt, stream=stream, **options, **GREEDY) for _ in range(2))
        before = read.result(20)
        unread.exception(20)
    for one, other in zip(before, unread.result()) if stream else [(before, unread.result())]:
        assert one["choices"] == other["choices"]


def test_close_forgets_nobody_who_waits(tiny_target):
    """What was to be called when no request runs is called, also if it was asked for just before."""
    for _ in range(10):
        batch = FlyBatch(tiny_target, 2, **OPTIONS)
        endless(batch)
        waiting = [batch.between_steps(lambda: "idle", when_idle=True) for _ in range(3)]
        batch.close()
        assert [one.result(5) for one in waiting] == ["idle"] * 3


def test_what_ended_the_stepping_is_said(tiny_target, monkeypatch):
    with FlyBatch(tiny_target, 2, **OPTIONS) as batch:
        handle = endless(batch)
        while not handle.stats.committed:
            time.sleep(0.01)
        monkeypatch.setattr(type(batch.model.decoder.batch), "step", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handle.result(20)
        with pytest.raises(ValueError, match=r"this FlyBatch failed \(division by zero\); load the model again"):
            batch.submit("Tom")
        assert batch.stats.committed > 0


def test_close_in_a_callback(tiny_target):
    batch = FlyBatch(tiny_target, 2, **OPTIONS)

    def closes(ids, row):
        batch.close()
        return False

    handle = batch.submit("Tom", stopping_criteria=StoppingCriteriaList([closes]), **GREEDY)
    assert isinstance(handle.exception(20), CancelledError)


def test_a_dropped_batch_ends_its_thread(tiny_target):
    threads = new_threads()
    batch = FlyBatch(tiny_target, 2, **OPTIONS)
    batch.submit("Tom", **GREEDY).result()
    assert len(threads()) == 1
    del batch
    gc.collect()
    assert not threads()


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for another process")
def test_ctrl_c_while_requests_run(tiny_target):
    """It cancels what runs, and the object serves the next."""
    script = f"""
        from pyfly_cpp import FlyBatch
        batch = FlyBatch({tiny_target!r}, 8, n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
        host = batch.llama
        ends = {{host.token_eos(): -100, host.token_bos(): -100}}  # both end a text
        print("ready", flush=True)
        try:
            batch.complete(["Once"] * 20, max_tokens=None, temperature=0, logit_bias=ends)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(len(batch.complete(["Tom", "One"], max_tokens=4)), flush=True)
        batch.submit("Once", max_tokens=None)  # the process ends with a request that runs
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out == "interrupted\n2\n"
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_of_the_process(tiny_target):
    """It has none of the threads, and hears so from whatever would wait for them."""
    script = f"""
        import asyncio, gc, os, signal, sys, traceback
        import llama_cpp
        from pyfly_cpp import FlyBatch, FlyLlama, PromptLookup, PyflyError

        def in_fork(check):
            if os.fork() == 0:
                signal.alarm(30)
                try:
                    check()
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                sys.exit()  # with what Python does at the end
            assert os.wait()[1] == 0

        def refuses(*calls):
            for call in calls:
                try:
                    call()
                except PyflyError as error:
                    assert "loaded by another process" in str(error)
                else:
                    raise AssertionError("a call went through")

        async def awaited(handle):
            return await handle

        def use_batch():
            refuses(
                lambda: batch.submit("Tom"), lambda: batch.complete(["Tom"]), lambda: batch.stats, batch.reset_stats,
                running.result, running.exception, lambda: list(running), lambda: asyncio.run(awaited(running)),
                lambda: batch.tokenize(b"x"),
            )
            assert not running.cancel()
            batch.close()

        def use_several_threads():
            refuses(lambda: llm("Tom"), lambda: next(generator), lambda: llm.eval([3]), llm.save_state)
            generator.close()
            llm.close()
            try:
                FlyLlama({tiny_target!r}, n_threads=2, **options)
            except ValueError as error:
                assert "spawn" in str(error) and "n_threads=1" in str(error), error
            else:
                raise AssertionError("it would have waited for ever")
            FlyLlama({tiny_target!r}, n_threads=1, n_threads_batch=1, **options)("Tom", max_tokens=2)

        def use_one_thread():
            assert alone("Tom", max_tokens=5, temperature=0)["choices"] == expected
            alone.close()

        def use_a_gpu():
            refuses(lambda: beside("Tom"))
            beside.close()

        options = {{"n_ctx": 256, "verbose": False, "adaptive": False}}
        batch = FlyBatch({tiny_target!r}, 2, n_threads=1, n_threads_batch=1, **options)
        ends = {{batch.llama.token_eos(): -100, batch.llama.token_bos(): -100}}
        running = batch.submit("Once", max_tokens=None, logit_bias=ends, stream=True)
        next(iter(running))
        in_fork(use_batch)
        running.cancel()
        assert len(batch.complete(["Tom"], max_tokens=3)) == 1  # the process has lost nothing
        batch.close()

        llm = FlyLlama({tiny_target!r}, n_threads=2, n_threads_batch=2, **options)
        generator = llm.generate([300, 301])
        next(generator)
        in_fork(use_several_threads)
        next(generator)

        alone = FlyLlama({tiny_target!r}, n_threads=1, n_threads_batch=1, **options)
        expected = alone("Tom", max_tokens=5, temperature=0)["choices"]
        if not llama_cpp.llama_supports_gpu_offload():
            in_fork(use_one_thread)
        llama_cpp.llama_supports_gpu_offload = lambda: True
        beside = FlyLlama({tiny_target!r}, n_threads=1, n_threads_batch=1, **options)
        in_fork(use_a_gpu)
        print("fine")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr
