"""Servers of the tests: in a thread, on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time

import httpx
import llama_cpp
import pytest

from pyfly_cpp.serve.server import Server, open_socket
from pyfly_cpp.serve.settings import Settings

F32 = llama_cpp.GGML_TYPE_F32
EXACT = {
    "n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "type_k": F32, "type_v": F32,
    "flash_attn": False,
}  # fmt: skip
NAME = "tiny"
BIG = {"prompt": [[5] * 400] * 8, "max_tokens": 1, "echo": True, "logprobs": 20}
"""A completion that is far longer than what the system takes for a client."""


class Running:
    """A server that runs, and its clients."""

    def __init__(self, server, port):
        self.server = server
        self.service = server.service
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path, **body):
        """A response to JSON."""
        return self.http.post(path, json=body)

    def events(self, path, **body):
        """The events of a stream, [DONE] included where there is one."""
        response = self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def until_idle(self, seconds=5.0):
        """Waits until no request runs or waits; returns the seconds that it took."""
        begun = time.monotonic()
        while True:
            health = self.http.get("/health").json()
            if health["texts_running"] == health["texts_waiting"] == 0:
                return time.monotonic() - begun
            assert time.monotonic() - begun < seconds, health
            time.sleep(0.01)

    def openai(self, **options):
        """A client of the openai package."""
        openai = pytest.importorskip("openai")
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})


@contextlib.contextmanager
def running(batch, send_buffer=None, **settings):
    """A server over a batch; `send_buffer`: bytes that the system takes for a client who does not read."""
    bound = open_socket("127.0.0.1", 0)
    if send_buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = bound.getsockname()[1]
    started = threading.Event()
    server = Server(
        batch, Settings(**{"name": NAME, "grace": 0.5, "sampling": {"temperature": 0.0}, **settings}), started.set
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    try:
        assert started.wait(10)
        one = Running(server, port)
        with one.http:
            yield one
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def no_end(batch):
    """A logit bias with which a text does not end."""
    llm = batch.llama
    return {str(t): -100 for t in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(llm._model.vocab, t)}


def command(model, *options, program=("-m", "pyfly_cpp"), stderr=subprocess.PIPE, **more):
    """`pyfly-cpp serve` on a free port, as a process."""
    own = [sys.executable, *program, "serve", "--port", "0", "-t", "1", "-m", model]
    return subprocess.Popen([*own, *options], stderr=stderr, text=True, **more)


def url_of(process):
    """The address that a server tells as it starts, perhaps behind warnings."""
    lines = []
    while not (found := re.search(r"http://[^ ]*/v1", "".join(lines))):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    return found[0].removesuffix("/v1")


def until(condition, seconds=10.0):
    """Waits for it; returns the seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds
        time.sleep(0.005)
    return time.monotonic() - begun


def until_ended(client, end=None):
    """Waits until the server has closed or cut a connection, or has sent `end`; what came."""
    content = b""
    client.settimeout(20)
    with client, contextlib.suppress(ConnectionResetError):
        while part := client.recv(2**16):
            content += part
            if end is not None and content.endswith(end):
                break
    return content
