"""Clients who are slow to send or to read."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest
from serving import BIG, running, until, until_ended
from test_manners import connected

from pyfly_cpp.serve.settings import RequestLimits

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def impatient(batch):
    """A server whose clients have little time."""
    limits = RequestLimits(head_seconds=0.3, read_seconds=0.5)
    with running(batch, send_buffer=4096, limits=limits) as one:
        yield one


def is_idle(server):
    return not server.server.server_state.tasks and server.service.turns.running == 0


# ---- Sending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
    b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
])  # fmt: skip
def test_a_kept_connection_ends_if_what_follows_is_slow(impatient, sent):
    """A later head, and the rest of a request that was answered already."""
    with socket.create_connection(("127.0.0.1", impatient.port)) as client:
        client.settimeout(20)
        if sent.startswith(b"GET"):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            content = b""
            while b'"ok"' not in content:
                content += client.recv(2**16)
            time.sleep(0.6)  # nothing was begun
        client.sendall(sent)
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begun < 20:
                client.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - begun < 20


def test_requests_on_a_kept_connection(impatient):
    with socket.create_connection(("127.0.0.1", impatient.port)) as client:
        client.settimeout(20)
        for part in (b"GET /health HTTP/1.1\r\nHo", b"st: localhost\r\n\r\n") * 3:
            client.sendall(part)
            time.sleep(0.2)
        content = b""
        while content.count(b'"ok"') < 3:
            content += client.recv(2**16)


# ---- Reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, body", [
    (TEXT, BIG), (TEXT, {**BIG, "stream": True}), ("/tokenize", {"content": "a " * 10_000, "with_pieces": True}),
])  # fmt: skip
def test_an_answer_that_is_not_read_is_dropped(impatient, path, body):
    connections = impatient.server.server_state.connections
    until(lambda: is_idle(impatient))
    before = set(connections)
    client = connected(impatient, body, path, receive_buffer=4096)
    until(lambda: set(connections) - before, 20)
    own = set(connections) - before
    until(lambda: not own & set(connections), 60)
    until(lambda: is_idle(impatient))
    content = until_ended(client)
    assert content.startswith(b"HTTP/1.1 200") and not content.endswith((b"}", b"0\r\n\r\n"))


def test_a_client_who_takes_its_time_gets_all(impatient):
    client = connected(impatient, BIG, receive_buffer=4096)
    content = b""
    while not content.endswith(b"}}"):
        content += client.recv(2**14)
        time.sleep(0.004)
    head, _, rest = content.partition(b"\r\n\r\n")
    assert len(json.loads(rest)["choices"]) == 8 and len(rest) > 2**20
    assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(rest)
    client.close()
