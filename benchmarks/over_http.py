"""Our server beside llama.cpp's: the same model, slots, clients and prompts, taking turns.

    python benchmarks/over_http.py --target MODEL --server PATH/TO/llama-server --prompts FILE... [--slots 8]
                                 [--clients 16] [--draft DRAFT --drafts 2,4] [--limit 64] [--tokens 128] [--out FILE]

Clients stream chat completions, greedy; each asks for its next prompt when it has the answer to the one before. Ours
answers as shipped (governed prompt lookup, which remembers earlier answers) and without drafts, llama.cpp's without
drafts and with its n-grams (--spec-type ngram-mod). With --draft, both also draft with that: ours governed,
llama.cpp's with each fixed length of --drafts. Way after way serves the same prompts, and another begins each time.
Tokens per second are of the whole turn, prompts included; both servers may keep what prompts share. A token's time is
when its event arrives: tokens of one step arrive together, so times between tokens are given as the mean and the 95th
percentile of the longest wait within an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import add_threads, markdown, print_machine, spread

from pyfly_cpp.machine.prompt_sets import read_prompts
from pyfly_cpp.machine.rows import read_jsonl

OURS, THEIRS = "pyfly-cpp", "llama.cpp"
_MOST_SECONDS = 300.0

# ---- Also for throughput.py: options, prompts, results, servers as child processes -----------------------------------


def add_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Options of a run; `tokens`: most tokens of an answer where nothing is said."""
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL with prompt, question or turns")
    parser.add_argument("--limit", type=int, default=64, help="prompts in all, the same number of each file")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"most tokens of an answer (default {tokens})")
    parser.add_argument("--ctx", type=int, default=768, help="tokens of one request")
    add_threads(parser)
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more arguments of llama-server, in quotes")
    parser.add_argument("--out", type=Path, help="every turn as a line of JSON")


def mixed_texts(args: argparse.Namespace) -> list[str]:
    """What the prompts of all files ask, one of each file in turn; of rows with a `question`, that."""
    files = []
    for path in args.prompts:
        asked = [str(row.get("question", "")) for _, row in read_jsonl(path)]
        files.append(asked if all(asked) else [prompt.turns[0] for prompt in read_prompts(path)])
    return [text for group in zip(*(texts[: args.limit // len(files)] for texts in files)) for text in group]


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


# ---- The clients -----------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """What the clients of one turn saw; seconds."""

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """Mean time of a token after the first, of each answer."""
    longest: list[float] = field(default_factory=list)
    """Longest wait for an event after the first, of each answer."""


async def answer(client: httpx.AsyncClient, text: str, n: int, turn: Turn) -> None:
    """Asks once, and reads the stream."""
    body = {
        "messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    last = time.perf_counter()
    waits: list[float] = []
    tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                tokens = int(event["usage"]["completion_tokens"])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                now = time.perf_counter()
                waits.append(now - last)
                last = now
    turn.tokens += tokens
    turn.first += waits[:1]
    if tokens > 1 and len(waits) > 1:
        turn.between.append(sum(waits[1:]) / (tokens - 1))
        turn.longest.append(max(waits[1:]))


async def load(url: str, texts: Sequence[str], n_clients: int, n: int) -> Turn:
    """All texts, by clients that ask again as soon as they are answered."""
    turn, waiting = Turn(), list(reversed(texts))

    async def one_client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=3600) as client:
            while waiting:
                await answer(client, waiting.pop(), n, turn)

    await asyncio.gather(*(one_client() for _ in range(n_clients)))
    return turn


def start(args: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, str]:
    """The URLs of all ways' servers."""

    def ours(more: Sequence[str] = ()) -> str:
        port = free_port()
        command = [
            sys.executable, "-m", "pyfly_cpp", "serve", "--model", args.target, "--parallel", str(args.slots),
            "--n-ctx", str(args.ctx), "--n-threads", str(args.threads), "--port", str(port), *more,
        ]  # fmt: skip
        return stack.enter_context(running(command, port))

    def theirs(more: Sequence[str] = ()) -> str:
        return stack.enter_context(llama_server(args, args.slots, more))

    ways = {
        OURS: ours(),
        f"{OURS}, plain": ours(["--drafter", "none"]),
        THEIRS: theirs(),
        f"{THEIRS}, n-grams": theirs(["--spec-type", "ngram-mod"]),
    }
    if args.draft:
        ways[f"{OURS}, drafts"] = ours(["--draft", args.draft])
        for k in args.drafts:
            more = ["-md", args.draft, "--spec-type", "draft-simple", "--spec-draft-n-max", str(k)]
            ways[f"{THEIRS}, drafts {k}"] = theirs([*more, "-td", str(args.threads), "-tbd", str(args.threads)])
    return ways


SHOWN = (("first", 50), ("first", 95), ("between", 50), ("between", 95), ("longest", 95))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over the turns; ratios turn by turn."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    base = [row["rate"] for row in rows if row["way"] == THEIRS]
    lines = []
    for way in ways:
        mine = [row for row in rows if row["way"] == way]
        ratios = [row["rate"] / other for row, other in zip(mine, base)]

        def of(key: str, mine: Sequence[dict[str, Any]] = mine) -> str:
            return f"{statistics.median(row[key] for row in mine):.3g}"

        cells = (of(f"{name}_{percent}") for name, percent in SHOWN)
        lines.append([way, of("rate"), spread(ratios), *cells])
    head = ["server", "tokens/s", f"x {THEIRS}", "first p50, s", "p95", "a token p50, s", "p95", "longest wait p95"]
    return markdown(head, lines)


def turns(args: argparse.Namespace, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every server takes its turn on a share of the texts."""
    with contextlib.ExitStack() as stack:
        ways = start(args, stack)
        for way, url in ways.items():
            asyncio.run(load(url, ["Say hello."], 1, 8))
            print(f"{way}: ready", file=sys.stderr)
        names = list(ways)
        for turn in range(args.turns):
            share = texts[turn * len(texts) // args.turns : (turn + 1) * len(texts) // args.turns]
            for way in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                begun = time.perf_counter()
                seen = asyncio.run(load(ways[way], share, args.clients, args.tokens))
                row = {"turn": turn, "way": way, "rate": seen.tokens / (time.perf_counter() - begun),
                       "tokens": seen.tokens}  # fmt: skip
                for name in ("first", "between", "longest"):
                    for percent in (50, 95):
                        row[f"{name}_{percent}"] = float(np.percentile(getattr(seen, name), percent))
                yield row


def measure(words: Sequence[str]) -> tuple[argparse.Namespace, list[dict[str, Any]]]:
    """What was asked for, by arguments of this script, and every turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, tokens=128)
    parser.add_argument("--server", required=True, help="llama-server of llama.cpp")
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("--drafts", default="2,4", help="llama.cpp's draft lengths")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3, help="each takes its share of the prompts")
    args = parser.parse_args(words)
    args.drafts = [int(k) for k in args.drafts.split(",")]
    return args, collect(turns(args, mixed_texts(args)), args.out)


def main() -> None:
    """Measures and prints a table."""
    print_machine()
    args, rows = measure(sys.argv[1:])
    print(f"{Path(args.target).name}, {args.threads} threads, {args.slots} slots, {args.clients} clients")
    print(table(rows))


if __name__ == "__main__":
    main()
