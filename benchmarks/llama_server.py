"""llama.cpp's own server as a child process, for the benchmarks that compare with it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

_MOST_SECONDS = 300.0


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[str]:
    """Runs a server that answers at /health; its URL. It ends with the block."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _MOST_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health"):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def llama_server(
    binary: str, target: str, n_slots: int, n_ctx: int, threads: int, more: Sequence[str] = ()
) -> Iterator[str]:
    """llama-server with n_slots slots of n_ctx tokens each, and its further arguments; its URL."""
    port = free_port()
    command = [
        binary, "-m", target, "-np", str(n_slots), "-c", str(n_ctx * n_slots), "-b", "512", "-t", str(threads),
        "-tb", str(threads), "--port", str(port), "--host", "127.0.0.1", *more,
    ]  # fmt: skip
    with running(command, port) as url:
        yield url
