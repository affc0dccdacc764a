"""What happens when there is too much to do, and when clients leave or do not read."""

from __future__ import annotations

import json
import re
import socket

import pytest
from serving import EXACT, no_end, running, until, until_ended

from pyfly_cpp import FlyBatch
from pyfly_cpp.engine.stepper import Stepper
from pyfly_cpp.serve.settings import RequestLimits

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def narrow(narrow_batch):
    """One request at once, of any length; one more may wait."""
    limits = RequestLimits(max_tokens=16000, max_waiting=1, max_answers=4)
    with running(narrow_batch, limits=limits, grace=0.2) as one:
        one.endless = {"prompt": "A", "max_tokens": 16000, "logit_bias": no_end(narrow_batch), "stream": True}
        yield one


def connected(server, body, path=PATH, receive_buffer=None):
    """A connection on which a request was sent."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect(("127.0.0.1", server.port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


@pytest.mark.parametrize("how", ["streaming", "waiting for all", "killed"])
def test_a_client_that_leaves_frees_its_slot(narrow, how):
    turns = narrow.service.turns
    client = connected(narrow, {**narrow.endless, "stream": how != "waiting for all"})
    until(lambda: turns.running == 1)
    if how == "streaming":
        assert b"data:" in client.recv(4096) + client.recv(4096)
    if how == "killed":  # what the system sends for a process that is no more
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    until(lambda: turns.running == 0, seconds=5)
    assert narrow.post(PATH, prompt="B", max_tokens=2).status_code == 200


def test_a_full_queue(narrow):
    turns = narrow.service.turns
    first, second = (connected(narrow, narrow.endless) for _ in range(2))
    until(lambda: turns.running == 1 and turns.waiting == 1)
    refused = narrow.post(PATH, prompt="C", max_tokens=1)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"] == {
        "message": "1 answers are already waiting for their turn; try again later.", "type": "rate_limit_error",
        "param": None, "code": "queue_full",
    }  # fmt: skip
    assert narrow.post(PATH, prompt="C", n=3).status_code == 400  # never
    assert narrow.http.get("/health").json() == {"status": "ok", "texts_running": 1, "texts_waiting": 1}
    metrics = narrow.http.get("/metrics").text
    assert "pyfly_texts_waiting 1.0\n" in metrics and 'status="429"' in metrics
    second.close()  # it leaves the queue
    until(lambda: turns.waiting == 0)
    first.close()
    narrow.until_idle()


def test_an_answer_that_takes_too_long(narrow_batch):
    with running(narrow_batch, limits=RequestLimits(max_tokens=16000, max_seconds=0.5)) as one:
        body = {"prompt": "A", "max_tokens": 16000, "logit_bias": no_end(narrow_batch)}
        choice = one.post(PATH, **body).json()["choices"][0]
        assert choice["finish_reason"] == "length" and len(choice["text"]) > 10
        # What might have been a stop text is kept.
        token = narrow_batch.llama.tokenize(b"a", add_bos=False)[-1]
        body = {"prompt": "A", "stop": ["a" * 50 + "b"], "logit_bias": {str(token): 100}, "max_tokens": 16000}
        answer = one.post(PATH, **body).json()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["text"] == "a" * answer["usage"]["completion_tokens"] != ""


def test_a_client_that_does_not_read_holds_nobody_up(batch):
    body = {"prompt": ["A"] * 4, "max_tokens": 150, "logit_bias": no_end(batch), "stream": True, "records": True}
    with running(batch, send_buffer=4096) as one:
        silent = connected(one, body, receive_buffer=4096)
        until(lambda: one.service.turns.running > 0)
        assert one.post(PATH, prompt="B", max_tokens=5).status_code == 200
        one.until_idle(30)  # its answers are written, though nobody reads them
        content = until_ended(silent, b"0\r\n\r\n")
        assert content.count(b'"finish_reason":"length"') == 4


def test_clients_who_neither_read_nor_send_do_not_hold_up_the_end(batch, capfd):
    body = {"prompt": ["A"] * 4, "max_tokens": 150, "logit_bias": no_end(batch), "stream": True, "records": True}
    with running(batch, send_buffer=4096, grace=0.1) as one:
        silent = connected(one, body, receive_buffer=4096)
        with socket.create_connection(("127.0.0.1", one.port)) as slow, silent:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            until(lambda: len(one.server.server_state.tasks) == 2)
            one.until_idle(30)
            one.server.should_exit = True
            until(lambda: not one.server.server_state.tasks)
    assert "Traceback" not in capfd.readouterr().err


def test_a_batch_that_failed(tiny_target_f32, monkeypatch):
    """It is no fault of the requests, and whoever watches the server is told."""
    with FlyBatch(tiny_target_f32, 1, **EXACT) as batch, running(batch) as one:
        assert one.post(PATH, prompt="A", max_tokens=1).status_code == 200
        monkeypatch.setattr(Stepper, "_step", lambda _: 1 / 0)
        for _ in range(2):
            assert one.post(PATH, prompt="A", max_tokens=1).status_code == 500
        health = one.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        for path in ("/metrics", "/props", "/slots", "/v1/models", "/tokenizer_info"):
            assert one.http.get(path).status_code == 200
        for path, body in (("tokenize", {"prompt": "A"}), ("detokenize", {"tokens": list(range(300))}),
                           ("infill", {"input_prefix": "A", "input_suffix": "B"})):  # fmt: skip
            assert one.post(f"/{path}", **body).status_code == 500


def test_stopping_ends_answers_cleanly(narrow_batch):
    with running(narrow_batch, limits=RequestLimits(max_tokens=16000), grace=0.3) as one:
        body = {"prompt": "A", "max_tokens": 16000, "logit_bias": no_end(narrow_batch)}
        streaming = connected(one, {**body, "stream": True})
        until(lambda: one.service.turns.running == 1)
        waiting = connected(one, body)
        until(lambda: one.service.turns.waiting == 1)
        one.server.should_exit = True
        answer, content = until_ended(waiting), until_ended(streaming)
        assert answer.startswith(b"HTTP/1.1 503") and b"shutting down" in answer
        assert b"shutting down" in content and b"data: [DONE]" in content
    with running(narrow_batch, limits=RequestLimits(max_tokens=16000), grace=0.1) as one:  # the batch goes on
        body = {"input": "A", "max_output_tokens": 16000, "logit_bias": no_end(narrow_batch), "stream": True}
        streaming = connected(one, body, "/v1/responses")
        until(lambda: one.service.turns.running == 1)
        one.server.should_exit = True
        events = re.findall(rb"^data: (.*)$", until_ended(streaming), re.MULTILINE)
        last = json.loads(events[-1])
        assert last["type"] == "error" and last["code"] == "stopping" and last["sequence_number"] == len(events) - 1
    with running(narrow_batch, limits=RequestLimits(max_tokens=16000), grace=20) as one:
        streaming = connected(one, {"prompt": "A", "max_tokens": 40, "stream": True})
        until(lambda: one.service.turns.running == 1)
        one.server.should_exit = True
        content = until_ended(streaming)
        assert b"shutting down" not in content and b"data: [DONE]" in content
