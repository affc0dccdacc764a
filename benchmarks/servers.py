"""What throughput.py and serving.py have in common: servers as child processes, options, prompts, results."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from resumable import read_questions

from pyfly_cpp.machine.threads import physical_cores

_MOST_SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Options of a run; `tokens`: most tokens of an answer where nothing is said."""
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL with prompt, question or turns")
    parser.add_argument("--limit", type=int, default=64, help="prompts in all, the same number of each file")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"most tokens of an answer (default {tokens})")
    parser.add_argument("--ctx", type=int, default=768, help="tokens of one text")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more arguments of llama-server, in quotes")
    parser.add_argument("--out", type=Path, help="every turn as a line of JSON")


def mixed_texts(args: argparse.Namespace) -> list[str]:
    """What the prompts of all files ask, one of each file in turn."""
    files = [read_questions(path)[: args.limit // len(args.prompts)] for path in args.prompts]
    return [question.turns[0] for group in zip(*files) for question in group]


def collect(rows: Iterable[dict[str, Any]], out: Path | None) -> list[dict[str, Any]]:
    """All rows, each shown and written as soon as it is there."""
    done = []
    for row in rows:
        done.append(row)
        print(row, file=sys.stderr, flush=True)
        if out is not None:
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return done


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
def llama_server(args: argparse.Namespace, n_slots: int, more: Sequence[str] = ()) -> Iterator[str]:
    """llama-server with n_slots slots, as the options say, and with more arguments before --server-args; its URL."""
    port, threads = free_port(), str(args.threads)
    command = [
        args.server, "-m", args.target, "-np", str(n_slots), "-c", str(args.ctx * n_slots), "-b", "512",
        "-t", threads, "-tb", threads, "--port", str(port), "--host", "127.0.0.1", *more, *args.server_args,
    ]  # fmt: skip
    with running(command, port) as url:
        yield url
