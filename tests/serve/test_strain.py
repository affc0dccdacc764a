"""What wears a server out, or leaves whoever runs it in the dark."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading

import pytest
from click_runner import click_runner
from serving import EXACT, running, until

from pyfly_cpp import FlyBatch
from pyfly_cpp.cli import cli
from pyfly_cpp.serve.settings import RequestLimits

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 30_000}),
        (CHAT, {"messages": [{"role": "user", "content": "<|im_start|>" * 3_000}]}),
        (TEXT, {"prompt": "<|im_start|>" * 3_000}),
        ("/tokenize", {"content": "<|im_start|>" * 3_000}),
    ],
)
def test_what_takes_long_to_read_is_refused_at_once(server, path, body, monkeypatch):
    monkeypatch.setattr(type(server.service.model.batch), "tokenize", None)
    got = server.post(path, **body)
    assert got.status_code == 400 and got.json()["error"]["code"] == "context_length_exceeded"


def test_long_requests_hold_nobody_up(server, monkeypatch):
    """Two are read at a time, others wait, and short ones go on. Those whose clients have left are not read."""
    begun, release = [], threading.Event()
    service = server.service

    def slow(text, *more):
        if len(text) > 2**16:
            begun.append(text[0])
            release.wait(60)
        return [1]

    def long(letter):
        return json.dumps({"prompt": letter * (2**16 + 1), "max_tokens": 1}).encode()

    monkeypatch.setattr(service.model, "tokenize", slow)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = []
        for n, letter in enumerate("aabbbb", 1):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port))))
            clients[-1].sendall(head % len(long(letter)) + long(letter))
            until(lambda n=n: len(begun) == min(n, 2) and len(service.reading._waiting) == n)
        assert server.post(TEXT, prompt="x", max_tokens=1).status_code == 200
        for client in clients[2:]:
            client.close()
        until(lambda: len(service.reading._waiting) == 2)
        assert service.reading.is_busy
        release.set()
        for client in clients[:2]:
            assert client.recv(12) == b"HTTP/1.1 200"
    until(lambda: not service.reading.is_busy)
    assert begun == ["a", "a"]


def test_grammars_without_the_model_file(tiny_target_f32, tmp_path, capfd):
    path = shutil.copy(tiny_target_f32, tmp_path)
    with FlyBatch(path, 1, **EXACT) as batch:
        (tmp_path / path.rpartition("/")[2]).rename(tmp_path / "moved")
        with running(batch) as server:
            got = server.post(TEXT, prompt="x", max_tokens=2, grammar='root ::= "a"')
            assert got.status_code == 503, got.text
            assert got.json()["error"]["code"] == "no_grammars"
    assert "grammars cannot be read" in capfd.readouterr().err


def test_a_connection_without_a_request_ends(batch):
    with running(batch, limits=RequestLimits(head_seconds=0.3)) as server:
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost: 127"):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.settimeout(10)
                client.sendall(sent)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""
        assert server.http.get("/health").status_code == 200


def test_refusals_are_counted_and_logged(batch, capfd):
    with running(batch, keys=("secret",), log="requests") as server:
        server.post(TEXT, prompt="x")
        known = {"Authorization": "Bearer secret"}
        server.http.get("/nothing", headers=known)
        server.http.get(TEXT, headers=known)
        server.http.get("/health", headers={"Host": "evil.example"})
        text = server.http.get("/metrics", headers=known).text
    lines = capfd.readouterr().err
    for status in (401, 403, 404, 405):
        assert f'pyfly_requests_total{{route="other",status="{status}"}} 1.0' in text
        assert f'"status": {status}' in lines


@pytest.mark.parametrize("option", [("--cors", "localhost:3000"), ("--alias", ""), ("--alias", "a,")])
def test_options_that_would_be_of_no_use(option, tiny_target):
    result = click_runner().invoke(cli, ["serve", "-m", tiny_target, *option])
    assert result.exit_code == 2 and option[0] in result.output
