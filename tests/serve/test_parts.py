"""What can be tested without a server: reading calls, turns."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import tracemalloc

import pytest

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.serve.answer_requests import read_decoding, written
from pyfly_cpp.serve.api_errors import ApiError
from pyfly_cpp.serve.body import check, parse
from pyfly_cpp.serve.metrics import Metrics
from pyfly_cpp.serve.openapi import describe
from pyfly_cpp.serve.requests import ChatRequest, DetokenizeRequest, SharedFields
from pyfly_cpp.serve.timings import Progress, Timings
from pyfly_cpp.serve.tools import Tools
from pyfly_cpp.serve.turns import Turns

FUNCTIONS = [
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}
]


def test_templates_without_tools_are_told_in_words():
    tools = Tools(FUNCTIONS, "auto", None, "no word of them")
    messages, told = tools.prepare([{"role": "user", "content": "hi"}])
    assert told is None and messages[0]["role"] == "system" and '"add"' in messages[0]["content"]
    native = Tools(FUNCTIONS, "auto", None, "{% if tools %}<tool_call>{% endif %}")
    messages, told = native.prepare([{"role": "user", "content": "hi"}])
    assert len(messages) == 1 and told[0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    "text", ["[{" * 100 + '\\"', '\\"' * 9 + "[[[[[", "\\" * 6 + "[[[[[", '\\\\"[[[[[', "ä[[[[[[\\u"]
)
def test_brackets_in_texts_have_no_depth(text):
    assert parse(json.dumps({"a": text, text: [[]]}).encode(), 4) == {"a": text, text: [[]]}
    with pytest.raises(ApiError, match="nested"):
        parse(json.dumps({"a": text, text: [[[[]]]]}).encode(), 4)


@pytest.mark.parametrize("text", ["x", "\n", '"', "\\", "[", "ä"])
def test_long_texts_take_little_memory(text):
    content = json.dumps({"a": text * 2**18}).encode()
    tracemalloc.start()
    parse(content, 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * len(content)


def test_lists_of_token_ids():
    check(DetokenizeRequest, {"tokens": [0, 9, 3.0, 5]})
    for wrong in (-1, 2**31, 2.5, True, "x", None):
        with pytest.raises(ApiError, match=r"tokens\[2\] must be"):
            check(DetokenizeRequest, {"tokens": [0, 9, wrong, 5.0]})


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 101}, "temperature"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x", 5]}, "stop[1]"),
        ({"stop": ["x"] * 1025}, "stop"),
        ({"tool_choice": "x"}, "tool_choice"),
        ({"tool_choice": {"function": {}}}, "tool_choice.function.name"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias"),
        ({"tools": [5] * 10**5}, "tools[0]"),
    ],
)
def test_errors_name_the_field(fields, param):
    with pytest.raises(ApiError) as failure:
        check(ChatRequest, {"messages": [{"role": "user", "content": "x"}], **fields})
    assert (failure.value.status, failure.value.param) == (400, param)
    assert failure.value.message.startswith(f"{param} ") and "pydantic" not in failure.value.message


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_description_is_whole(has_keys):
    document = describe(has_keys)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert {"ChatRequest", "CompletionRequest", "ResponseRequest"} < named == set(document["components"]["schemas"])
    assert "securitySchemes" in document["components"] or not has_keys
    temperature = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]["anyOf"]
    assert {"type": "number", "minimum": 0, "maximum": 100} in temperature


def test_requests_take_turns():
    """One that wants many texts does not hold up one that came later."""
    order = []

    async def one(turns, name, n):
        with turns.admitted(n) as ticket:

            async def text():
                async with ticket.turn(10):
                    order.append(name)
                    await asyncio.sleep(0.001)

            await asyncio.gather(*(text() for _ in range(n)))

    async def main():
        turns = Turns(1, 10)
        await asyncio.gather(one(turns, "a", 5), one(turns, "b", 2), one(turns, "c", 1))
        assert (turns.running, turns.waiting) == (0, 0)

    asyncio.run(main())
    assert "".join(order) == "aabcabaa"


def test_turns_that_are_given_up():
    async def main():
        turns = Turns(1, 3)

        async def wait(seconds=10.0):
            with turns.admitted(1) as ticket:
                async with ticket.turn(seconds):
                    await asyncio.sleep(10)

        first, second, third = (asyncio.ensure_future(wait()) for _ in range(3))
        await asyncio.sleep(0.01)
        assert (turns.running, turns.waiting) == (1, 2)
        second.cancel()
        await asyncio.sleep(0.01)
        assert (turns.running, turns.waiting) == (1, 1)
        with pytest.raises(ApiError) as failure:
            await wait(0.01)
        assert failure.value.status == 429 and int(failure.value.headers["Retry-After"]) >= 1
        with pytest.raises(ApiError) as failure, turns.admitted(3):
            pass
        assert failure.value.code == "queue_full"
        first.cancel()
        await asyncio.sleep(0.01)
        assert (turns.running, turns.waiting) == (1, 0)
        fourth = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        turns.close()
        with pytest.raises(ApiError) as failure:
            await fourth
        assert failure.value.status == 503
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert (turns.running, turns.waiting) == (0, 0)

    asyncio.run(main())


def test_those_who_left_are_forgotten():
    async def main():
        turns = Turns(1, 3)
        with turns.admitted(1) as ticket:
            async with ticket.turn(10):
                for _ in range(5):

                    async def wait():
                        with turns.admitted(2) as other:
                            await asyncio.gather(*(other.turn(10).__aenter__() for _ in range(2)))

                    task = asyncio.ensure_future(wait())
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    assert turns.waiting == 2
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    await asyncio.sleep(0)
                assert turns.waiting == 0 and not turns._queues

    asyncio.run(main())


def test_metrics_are_what_prometheus_reads():
    metrics = Metrics(lambda: Stats(rounds=2, committed=5, matched=2, loose_accepted=1), Turns(1, 1))
    metrics.requests.labels("/v1/completions", 200).inc()
    metrics.first_token.observe(0.02)
    text = metrics.render().decode()
    assert 'pyfly_requests_total{route="/v1/completions",status="200"} 1.0\n' in text
    assert 'pyfly_tokens_total{origin="target"} 2.0\n' in text
    assert "pyfly_mean_accepted 2.5\n" in text and "pyfly_texts_waiting 0.0\n" in text
    assert 'pyfly_first_token_seconds_bucket{le="0.025"} 1.0\n' in text


def test_a_request_decodes_as_the_server_does_but_for_what_it_says():
    own = Decoding("margin:0.3", "agree:2", draft_max=8)
    assert read_decoding(SharedFields(), None, own) == own and written(own) == "margin:0.3 agree:2"
    loose = read_decoding(SharedFields(gate="entropy:0.3"), "draft-max=3", own)
    assert loose == Decoding("entropy:0.3", "agree:2", draft_max=3), "the window that the server was given stays"
    assert written(loose) == "entropy:0.3 agree:2"
    assert written(read_decoding(SharedFields(speculative=False), "gate=margin:1", own)) == "plain"


@pytest.mark.parametrize(
    "pieces, n_first, n_steps, has_speed",
    [
        ([10], 10, 1, False),
        ([4, 6], 4, 2, True),
        ([4, 20, 40], 4, 3, True),
        ([40], 4, 3, True),  # a stop string held the text back
    ],
)
def test_the_speed_is_that_of_the_tokens_behind_the_first_step(pieces, n_first, n_steps, has_speed, monkeypatch):
    clock = itertools.count(1.0, 0.5)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timings = Timings()
    for n in (0, 5):
        timings.add(Progress(n, 5))
    for n in pieces[:-1]:
        timings.add(Piece("x", n_tokens=n))
        assert n > pieces[0] or timings.as_dict()["predicted_per_second"] == 0
    n = pieces[-1]
    stats = Stats(rounds=n_steps, committed=n, beginnings=1, committed_first=n_first, prefilled=4)
    timings.add(Piece("x", n_tokens=n, finish="stop", stats=stats))
    got = timings.as_dict()
    ms = 500.0 * len(pieces) * has_speed
    assert (got["predicted_n"], got["predicted_ms"]) == (n, ms)
    assert got["predicted_per_second"] == (pytest.approx(1e3 * (n - n_first) / ms) if has_speed else 0)
    assert got["predicted_per_token_ms"] == (pytest.approx(ms / (n - n_first)) if has_speed else 0)
