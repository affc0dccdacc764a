"""Many clients at once, half of whom leave midway, among hostile ones; and requests that a machine makes up. Minutes:
-m serve_load."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from test_bad_requests import hostile

pytestmark = pytest.mark.serve_load

N_CLIENTS, N_REQUESTS, N_SLOTS, N_HOSTILE = 64, 512, 8, 170
PATH = "/v1/completions"
PROMPTS = [
    "Natalia sold clips to 48 of her friends in April.",
    "Tom has 3 apples and 4 pears. How many fruits does he have?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take? " * 3,
    "def add(a, b):",
]
BODIES = [
    {"prompt": prompt, "max_tokens": n, "temperature": temperature, "seed": 7}
    for prompt, n, temperature in itertools.product(PROMPTS, (4, 24, 64), (0.0, 0.9))
]


@pytest.fixture
def child(tiny_target_f32, tiny_draft):
    """A server in a process of its own: (process, url)."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("serve_exact.py")), tiny_target_f32, tiny_draft, str(N_SLOTS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def memory_of(process):
    """Resident memory in MiB."""
    return number_of(process, "VmRSS") / 1024


def number_of(process, what):
    """A number of the system's about a process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(rf"{what}:\s+(\d+)", status)[1])


def n_files(process):
    """Its open files, connections among them."""
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


async def ask(client, body, n_events, first, between):
    """The text of a stream; None where the client leaves after n_events."""
    text, n, begun = "", 0, time.monotonic()
    last = begun
    async with client.stream("POST", PATH, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text
            now = time.monotonic()
            (first if n == 0 else between).append(now - last)
            last = now
            n += 1
            text += json.loads(line[6:])["choices"][0]["text"]
            if n_events is not None and n >= n_events:
                return None
    raise AssertionError("the stream ended without its end")


async def load(url, expected, n_requests, choose, bodies=()):
    """(requests that were read to their end, seconds to the first event, seconds between events)

    Args:
        bodies: Hostile ones with their paths, which one more client sends.
    """
    first, between, finished = [], [], 0
    waiting = list(range(n_requests))

    async def one_client():
        nonlocal finished
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            while waiting:
                i = waiting.pop()
                which = choose.randrange(len(BODIES))
                leaves = choose.randrange(1, 8) if i % 2 == 0 else None
                if leaves is None and i % 5 == 0:
                    response = await client.post(PATH, json=BODIES[which])
                    text = response.json()["choices"][0]["text"]
                else:
                    text = await ask(client, BODIES[which], leaves, first, between)
                if text is not None:
                    finished += 1
                    assert text == expected[which], (i, BODIES[which])

    async def hostile_client():
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            for path, body in bodies:
                response = await client.post(path, content=body)
                assert 400 <= response.status_code < 500, (path, body[:200], response.text)

    await asyncio.gather(hostile_client(), *(one_client() for _ in range(N_CLIENTS)))
    return finished, first, between


def test_many_clients(child, alone, capsys):
    process, url = child
    expected = [alone.create_completion(**body)["choices"][0]["text"] for body in BODIES]
    choose = random.Random(1)
    bodies = random.Random(2).sample(hostile(0), N_HOSTILE)
    asyncio.run(load(url, expected, N_REQUESTS // 4, choose, bodies))  # caches are filled, threads have begun
    before, n_before = memory_of(process), (number_of(process, "Threads"), n_files(process))
    tokens_before, counted = tokens_of(url), requests_of(url)
    begun = time.monotonic()
    finished, first, between = asyncio.run(load(url, expected, N_REQUESTS, choose, bodies))
    seconds = time.monotonic() - begun
    n_tokens = tokens_of(url) - tokens_before
    deadline = time.monotonic() + 5
    n_requests = N_REQUESTS + N_HOSTILE  # each of them was counted, and left nothing
    while (
        (health := httpx.get(f"{url}/health").json())["texts_running"] or health["texts_waiting"]
        or sum(requests_of(url).values()) - sum(counted.values()) != n_requests or n_files(process) > n_before[1]
    ):  # fmt: skip
        assert time.monotonic() < deadline, (health, requests_of(url), n_files(process), n_before)
        time.sleep(0.01)
    after, n_left = memory_of(process), requests_of(url)[PATH, "499"] - counted[PATH, "499"]
    assert finished >= N_REQUESTS // 2
    assert after - before < 24, (before, after)
    assert number_of(process, "Threads") <= n_before[0]
    p50, p95 = 50, 95
    with capsys.disabled():
        print(
            f"\n{N_REQUESTS} requests of {N_CLIENTS} clients, {N_SLOTS} at once, in {seconds:.1f} s: {finished} read "
            f"to their end and as alone, {n_left:.0f} left; {len(bodies)} hostile ones refused; "
            f"{n_tokens / seconds:.0f} tokens/s\n"
            f"first event p50 {np.percentile(first, p50):.3f} s, p95 {np.percentile(first, p95):.3f} s; between events "
            f"p50 {1000 * np.percentile(between, p50):.1f} ms, p95 {1000 * np.percentile(between, p95):.1f} ms\n"
            f"memory {before:.0f} MiB before, {after:.0f} MiB after; threads and files {n_before} before"
        )


def tokens_of(url):
    text = httpx.get(f"{url}/metrics").text
    return float(re.search(r"^pyfly_completion_tokens_total (.*)", text, re.MULTILINE)[1])


def requests_of(url):
    """How many were counted, by route and status."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(r'^pyfly_requests_total\{route="(.*)",status="(.*)"\} (.*)', text, re.MULTILINE)
    return {(route, status): float(n) for route, status, n in found}


def limited(body):
    """A body whose answer is short."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if not isinstance(body.get(name), int) or body[name] > 4:
                body[name] = 4
    return body


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_the_description(child, mode):
    """No request that the description allows, and none that it does not, is too much for the server."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings

    _, url = child
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode == "NEGATIVE" and operation.method == "get":
            continue

        @settings(max_examples=150, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
        def ask_anything(case):
            case.body = limited(case.body)
            response = case.call(timeout=60)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            is_lacking = response.status_code == 501 and response.json()["error"]["code"] == "not_supported"
            assert response.status_code < 500 or is_lacking, (case.body, response.text)

        ask_anything()
    print(mode, statuses)
    assert sum(statuses.values()) > 100
