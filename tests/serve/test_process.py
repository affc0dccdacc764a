"""`pyfly-cpp serve` as a process: its start, its end, and what keeps it from either."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import llama_cpp
import pytest
from click_runner import click_runner
from serving import command, until, url_of

from pyfly_cpp.cli import cli
from pyfly_cpp.engine import costs

OPTIONS = ("--parallel", "1", "-c", "2048")


@pytest.fixture
def start(tiny_target):
    """Starts servers; kills those that are left."""
    started = []

    def begin(*options, **more):
        process = command(tiny_target, *OPTIONS, *options, **more)
        started.append(process)
        return process, None if process.stderr is None else url_of(process)

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_sigterm_lets_the_answer_finish(start):
    process, url = start("--log", "texts")
    body = {"prompt": "Tom has 3 apples.", "max_tokens": 300, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    (line,) = errors.splitlines()
    told = json.loads(line)
    assert told["request"]["prompt"] == body["prompt"] and told["texts"][0] and told["status"] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_two_interrupts_end_it_at_once(start, stream):
    """An hour of grace is over."""
    process, url = start("--grace", "3600", "--most-tokens", "16000", "-c", "16384")
    body = {"prompt": "A", "max_tokens": 16000, "ignore_eos": True, "stream": stream}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        until(lambda: httpx.get(f"{url}/health").json()["texts_running"])
        process.send_signal(signal.SIGINT)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        process.send_signal(signal.SIGINT)
        got = answer.result()
    assert got.status_code == (200 if stream else 503) and "shutting down" in got.text
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    (line,) = errors.splitlines()
    assert "3600 s" in line and "Ctrl-C again" in line


STUCK = """
import sys, time
from pyfly_cpp.cli import cli
from pyfly_cpp.serve.served_model import Model
Model.tokenize = lambda *_: (print("stuck", file=sys.stderr, flush=True), time.sleep(120))
cli.main(sys.argv[1:])
"""


def test_sigterm_does_not_wait_for_a_tokenizer(start, tmp_path):
    """The client is told, and what the drafter remembers is kept."""
    answers = tmp_path / "answers.bin"
    options = ("--grace", "0.5", "--drafter", "lookup", "--lookup-memory", str(answers))
    process, url = start(*options, program=("-c", STUCK))
    written = httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 20}, timeout=30)
    assert written.status_code == 200
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(httpx.post, f"{url}/tokenize", json={"content": "x" * 2**17}, timeout=60)
        assert process.stderr.readline() == "stuck\n"
        process.send_signal(signal.SIGTERM)
        assert stuck.result().status_code == 503
    assert process.wait(60) == 0
    assert answers.stat().st_size > 0


def test_a_looser_default_is_shown_and_prompts_are_not_logged(start, tiny_draft):
    options = ("--log", "requests", "--gate", "margin:0.5", "--draft", tiny_draft, "--no-adaptive", "--embeddings")
    process, url = start(*options)
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["pyfly"]
    assert model["gate"] == "margin:0.5" and not model["lossless"]
    assert model["system_fingerprint"].endswith("-margin:0.5")
    httpx.post(f"{url}/v1/completions", json={"prompt": "sesame", "max_tokens": 2}, timeout=30)
    httpx.post(f"{url}/v1/completions", json={"prompt": "sesame", "max_tokens": "sesame"}, timeout=30)
    assert len(httpx.post(f"{url}/v1/embeddings", json={"input": ["sesame"] * 2}, timeout=30).json()["data"]) == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert '"status": 200' in errors and '"status": 400' in errors
    assert "sesame" not in errors


def test_a_full_disk(start):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        process, _ = start("--port", str(port), "--log", "texts", stderr=full, stdout=full, env=env)
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = httpx.post(
                    f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "A", "max_tokens": 2}, timeout=30
                )
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
    assert answer.status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.mark.slow
def test_caches_that_cannot_be_written(start, tiny_draft, tmp_path):
    """What batches cost is measured at the start, and kept where that is possible."""
    resource = pytest.importorskip("resource")
    env = {name: value for name, value in os.environ.items() if name != costs.VARIABLE}

    def no_file_may_grow():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    process, url = start(
        "--draft", tiny_draft, env={**env, "XDG_CACHE_HOME": str(tmp_path)}, preexec_fn=no_file_may_grow
    )
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "A", "max_tokens": 2}, timeout=30)
    assert answer.status_code == 200
    folder = tmp_path / "pyfly-cpp" / "costs"
    assert folder.exists() and not list(folder.iterdir())
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def failing(*options):
    """The error of a server that does not start: (exit code, stderr)."""
    done = click_runner().invoke(cli, ["serve", "--port", "0", "--parallel", "1", "-t", "1", *options])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(("options", "is_open"), [((), False), (("--no-auth",), True), (("--api-key", "x"), True)])
def test_other_machines_need_a_key_or_a_permission(tiny_target, monkeypatch, options, is_open):
    monkeypatch.setattr("pyfly_cpp.serve.server.serve", lambda *_: True)
    code, said = failing("-m", tiny_target, "--host", "0.0.0.0", *options)
    assert code == (0 if is_open else 2) and ("--no-auth" in said) is not is_open


@pytest.mark.parametrize(
    "options, temperature, page", [((), 0.0, {"temperature": 0.7}), (("--temperature", "0.3"), 0.3, {})]
)
def test_the_page_samples_as_chat_does(tiny_target, monkeypatch, options, temperature, page):
    """Programs do not, unless they ask for it."""
    made = []
    monkeypatch.setattr("pyfly_cpp.serve.server.serve", lambda _, settings, *__: made.append(settings) or True)
    assert failing("-m", tiny_target, *options)[0] == 0
    assert (made[0].sampling["temperature"], made[0].page_sampling) == (temperature, page)


def test_a_port_in_use(tiny_target):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, error = failing("-m", tiny_target, "--port", port)
    assert code == 1
    remedy = "stop the program that listens there, or give another --port"
    assert error == f"Error: port {port} of 127.0.0.1 is in use; {remedy}.\n"


def test_a_context_beyond_all_memory(tiny_target, monkeypatch):
    """Nothing of that size is made to find out."""
    sizes = []
    make = llama_cpp.llama_init_from_model

    def look(model, params):
        sizes.append(params.n_ctx)
        return make(model, params)

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", look)
    for parallel in ("auto", "2"):
        code, error = failing("-m", tiny_target, "-c", "1000000000", "--parallel", parallel)
        assert code == 1 and "--n-ctx" in error.splitlines()[-1]
    assert max(sizes) <= 2**18


def test_other_machines_need_a_key(tiny_target, tmp_path, start):
    code, error = failing("-m", tiny_target, "--host", "0.0.0.0")
    assert code == 2 and "--api-key-file" in error
    keys = tmp_path / "keys"
    keys.write_text("\n")
    code, error = failing("-m", tiny_target, "--host", "0.0.0.0", "--api-key-file", str(keys))
    assert code == 1 and "has no key" in error
    shared = ("--drafter", "lookup", "--lookup-memory", str(tmp_path / "answers.bin"))
    code, error = failing("-m", tiny_target, "--api-key", "one", "--api-key", "other", *shared)
    assert code == 1 and "--lookup-memory" in error
    keys.write_bytes(b"\xef\xbb\xbffrom-the-file\r\nin-latin-1-\xe4\n")
    options = ("--host", "0.0.0.0", "--api-key-file", str(keys), "--api-key", " spaced ")
    _, url = start(*options, env={**os.environ, "PYFLY_API_KEY": "from-there\n"})
    url = url.replace("0.0.0.0", "127.0.0.1")
    good = (b"from-the-file", b"in-latin-1-\xe4", b"from-there", b"spaced")
    for key, status in (*((key, 200) for key in good), (b"else", 401)):
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": b"Bearer " + key}).status_code == status
