"""Streams whose request waits, or whose prompt is long: their clients, and proxies between, must see that they live."""

from __future__ import annotations

import contextlib
import json
import re
import time

import pytest
from serving import no_end, running, until, until_ended
from test_manners import connected

from pyfly_cpp.serve.settings import RequestLimits

CHAT, TEXT, RESPONSE, MESSAGE, NATIVE = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion",
)  # fmt: skip
SAID = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHAT: {"messages": SAID}, TEXT: {"prompt": "A"}, RESPONSE: {"input": "A"},
    MESSAGE: {"messages": SAID, "max_tokens": 4}, NATIVE: {"prompt": "A"},
}  # fmt: skip


@contextlib.contextmanager
def occupied(batch, **options):
    """A server whose only slot is taken until the connection is closed: (server, connection)."""
    with running(batch, limits=RequestLimits(max_tokens=16000, silent_seconds=0.1), **options) as server:
        yield server, occupy(server, batch)


def occupy(server, batch):
    """The connection of an answer that does not end."""
    client = connected(server, {"prompt": "A", "max_tokens": 16000, "logit_bias": no_end(batch), "stream": True})
    until(lambda: server.service.turns.running == 1)
    return client


def test_a_stream_that_waits_is_not_silent(narrow_batch):
    """On each route: the head, and comments until the first token."""
    with occupied(narrow_batch) as (server, first):
        waiting = [connected(server, {**body, "stream": True}, path) for path, body in BODIES.items()]
        contents = []
        for client in waiting:
            content = b""
            while content.count(b"\n: waiting\n\n") < 3:
                content += client.recv(2**16)
            assert content.startswith(b"HTTP/1.1 200")
            contents.append(content)
        first.close()
        for client, content in zip(waiting, contents):
            while not content.endswith(b"\r\n0\r\n\r\n"):
                content += client.recv(2**16)
            events = re.findall(rb"^data: (\{.*)$", content, re.MULTILINE)
            assert len(events) > 1 and all(json.loads(event) for event in events)
            client.close()


def test_the_head_does_not_wait_for_a_long_prompt(narrow_batch):
    with running(narrow_batch, limits=RequestLimits(silent_seconds=0.2)) as server:
        client = connected(server, {"prompt": [5] * 16000, "max_tokens": 1, "stream": True})
        content = client.recv(2**16)
        if server.service.turns.running:  # it is being read
            assert content.startswith(b"HTTP/1.1 200") and b"data:" not in content
        client.close()
        server.until_idle(60)


def test_the_clients_package_takes_comments_and_late_errors(narrow_batch):
    openai = pytest.importorskip("openai")
    with occupied(narrow_batch, grace=0.1) as (server, first):
        client = server.openai()
        stream = client.chat.completions.create(model="any", messages=SAID, stream=True, max_tokens=3)
        assert next(iter(stream)).choices[0].delta.role == "assistant"  # while it waits
        first.close()
        assert list(stream)[-1].choices[0].finish_reason
        first = occupy(server, narrow_batch)
        stream = client.chat.completions.create(model="any", messages=SAID, stream=True, max_tokens=3)
        server.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        first.close()


@pytest.mark.clients
def test_anthropics_package_takes_comments_and_late_errors(narrow_batch):
    anthropic = pytest.importorskip("anthropic")
    with occupied(narrow_batch, grace=0.1) as (server, first):
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        body = {"model": "any", "messages": SAID, "stream": True, "max_tokens": 3}
        stream = client.messages.create(**body)
        assert next(iter(stream)).type == "message_start"  # while it waits
        time.sleep(0.3)
        first.close()
        assert list(stream)[-1].type == "message_stop"
        first = occupy(server, narrow_batch)
        stream = client.messages.create(**body)
        assert next(iter(stream)).type == "message_start"
        server.server.should_exit = True
        with pytest.raises(anthropic.APIError, match="shutting down"):
            list(stream)
        first.close()


@pytest.mark.parametrize("path", list(BODIES))
def test_an_error_after_the_head_is_an_event(narrow_batch, path):
    with occupied(narrow_batch, grace=0.1) as (server, first):
        client = connected(server, {**BODIES[path], "stream": True}, path)
        content = b""
        while b": waiting" not in content:
            content += client.recv(2**16)
        server.server.should_exit = True
        content += until_ended(client)
        event = json.loads(re.findall(rb"^data: (\{.*)$", content, re.MULTILINE)[-1])
        if path == RESPONSE:
            assert event["type"] == "error" and event["code"] == "stopping"
        else:
            assert event["error"]["code"] == "stopping"
        assert (b"event: error\n" in content) == (path in (RESPONSE, MESSAGE))
        assert content.endswith(b"0\r\n\r\n")
        first.close()
        until(lambda: not server.server.server_state.tasks, 20)
        counted = server.service.metrics.requests.labels(path, 503)._value.get()
        assert counted >= 1


@pytest.mark.parametrize("path", list(BODIES))
def test_an_error_before_the_turn_has_its_status(narrow_batch, path):
    long = "x y z " * 9000
    said = [{"role": "user", "content": long}]
    for fields in ({"messages": said, "prompt": long, "input": long}, {"max_tokens": -5, "max_output_tokens": -5}):
        with running(narrow_batch, limits=RequestLimits(silent_seconds=0.02)) as server:
            body = {**BODIES[path], **{name: fields[name] for name in fields if name in BODIES[path]}}
            body |= {} if "messages" in fields else fields
            assert server.post(path, **body, stream=True).status_code == 400
