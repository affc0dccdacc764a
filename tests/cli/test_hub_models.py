"""Models of the hub, against a local server that speaks its protocol: `models fetch hf:...`, `models pair hf:...`, and
the offer to fetch one that a command needs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_hub import fake_hub

from pyfly_cpp.cli import models_command
from pyfly_cpp.models.named import locate

from .conftest import TARGET

pytest.importorskip("huggingface_hub")

CONTENT = os.urandom(24 << 20)  # more than two of the pieces that huggingface_hub writes
FILES = {"model.gguf": CONTENT}


@pytest.fixture
def hub():
    with fake_hub(FILES) as server:
        yield server


def launch(home, url, *arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE):
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
    for name in ("HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-m", "pyfly_cpp", *arguments],
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def start(home, url, *arguments):
    return launch(home, url, "models", *arguments)


def fetch(home, url, name="hf:owner/repo/model.gguf"):
    process = start(home, url, "fetch", name)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err


def test_a_connection_that_breaks(hub, tmp_path):
    hub.breaks_at = 12 << 20
    code, out, err = fetch(tmp_path, hub.url)
    assert code == 0, err
    assert Path(out).read_bytes() == CONTENT
    first, second = hub.ranges
    assert first is None and int(second.split("=")[1].split("-")[0]) >= 10 << 20  # goes on where it stopped
    assert fetch(tmp_path, hub.url)[:2] == (0, out)  # it is here
    assert len(hub.ranges) == 2


def test_ctrl_c(hub, tmp_path):
    hub.stalls_at = 12 << 20
    process = start(tmp_path, hub.url, "fetch", "hf:owner/repo/model.gguf")
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size >= 10 << 20 for path in tmp_path.rglob("*.incomplete")):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in err, err
    hub.stalls_at = None
    assert fetch(tmp_path, hub.url)[0] == 0


def test_a_wrong_checksum(hub, tmp_path):
    hub.sha256 = "0" * 64
    code, _, err = fetch(tmp_path, hub.url)
    assert code == 1
    assert "arrived damaged (wrong SHA-256) and was removed; fetch it again." in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == len(CONTENT)]
    hub.sha256 = None
    assert fetch(tmp_path, hub.url)[0] == 0


def test_no_such_file(hub, tmp_path):
    code, _, err = fetch(tmp_path, hub.url, "hf:owner/repo/other.gguf")
    assert code == 1 and "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("Error")]
    assert "the hub did not give 'hf:owner/repo/other.gguf'" in line


@pytest.mark.parametrize(
    ("offline", "name", "remedy"),
    [("1", "hf:owner/repo", "unset HF_HUB_OFFLINE"), ("0", "hf:owner/repo/tiny.gguf", "check the network")],
)
def test_no_network(tmp_path, monkeypatch, offline, name, remedy):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    code, _, err = fetch(tmp_path, "http://127.0.0.1:9", name)
    assert code == 1 and "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("Error: the hub cannot be reached (")
    assert line.endswith(f"is not here; {remedy}, or give --model the path of a file.")


def command(home, url, *arguments):
    process = start(home, url, *arguments)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def test_a_model_by_its_type(hub, tmp_path, monkeypatch):
    parts = {f"Q4_K_M/m-Q4_K_M-0000{i}-of-00002.gguf": os.urandom(1000 + i) for i in (1, 2)}
    hub.files = {**parts, "m-Q8_0.gguf": b"8" * 3000, "mmproj-F16.gguf": b"p" * 10}
    code, out, err = command(tmp_path, hub.url, "fetch", "hf:owner/repo", "hf:owner/repo:q8_0")
    assert code == 0, err
    usual, eight = map(Path, out.splitlines())
    assert [usual.with_name(Path(name).name).read_bytes() for name in parts] == list(parts.values())
    assert eight.read_bytes() == b"8" * 3000
    nowhere = "http://127.0.0.1:9"  # what is here is found and checked without the hub
    assert command(tmp_path, nowhere, "fetch", "hf:owner/repo:Q8_0")[:2] == (0, f"{eight}\n")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    os.symlink(tmp_path / "gone", eight.with_name("m-Q2_K.gguf"))
    for name, path in (("hf:owner/repo:Q4_K_M", usual), ("hf:owner/repo", usual), ("hf:owner/repo:Q8_0", eight)):
        assert locate(name) == path
    assert locate("hf:owner/repo:Q6_K") is None and locate("hf:owner/other") is None
    usual.with_name("m-Q4_K_M-00002-of-00002.gguf").unlink()
    assert locate("hf:owner/repo:Q4_K_M") is None and locate("hf:owner/repo") == eight
    whole = "hf:owner/repo/Q4_K_M/m-Q4_K_M-00001-of-00002.gguf"
    assert locate(whole) is None
    assert command(tmp_path, hub.url, "fetch", whole)[:2] == (0, f"{usual}\n")
    assert locate(whole) == usual == locate(whole.replace("00001-of", "00002-of"))


def at_terminal(home, url, keys, *arguments):
    """(exit code, stdout, what a terminal shows of stderr) of a command at a terminal where these keys are pressed."""
    pty = pytest.importorskip("pty")
    master, terminal = pty.openpty()
    process = launch(home, url, *arguments, stdin=terminal, stderr=terminal)
    os.close(terminal)
    os.write(master, keys.encode())
    shown = []

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(master, 65536):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        reader.join()
        os.close(master)
    return process.returncode, out, b"".join(shown).decode("utf-8", "replace")


def test_a_model_that_is_not_here_is_offered_at_a_terminal(hub, tmp_path):
    hub.files = {"m-Q8_0.gguf": TARGET.read_bytes(), "m-F16.gguf": b"f" * 10}
    complete = ("complete", "-m", "hf:owner/repo", "-t", "1", "-n", "4", "Tom")
    code, out, shown = at_terminal(tmp_path, hub.url, "n\n", *complete)
    assert code == 1 and not out and not hub.ranges
    assert "hf:owner/repo:Q8_0" in shown and "11.1 MB, mit" in shown
    error = " ".join(shown.partition("Error: ")[2].split())
    assert "run `pyfly-cpp models fetch hf:owner/repo`" in error and error.count(".") == 1 and "Traceback" not in shown
    piped = launch(tmp_path, hub.url, *complete)
    assert "models fetch hf:owner/repo" in piped.communicate(timeout=60)[1] and piped.returncode == 1 and not hub.ranges
    code, out, shown = at_terminal(tmp_path, hub.url, "y\n", *complete)
    assert code == 0 and out.strip(), shown
    code, _, shown = at_terminal(tmp_path, "http://127.0.0.1:9", "", *complete)
    assert code == 0 and "not on this machine" not in shown


def test_a_hub_that_is_not_reached_is_one_sentence_at_a_terminal(tmp_path):
    code, _, shown = at_terminal(tmp_path, "http://127.0.0.1:9", "y\n", "demo", "-m", "hf:owner/repo:Q8_0")
    assert code == 1 and "the hub cannot be reached" in shown and "Traceback" not in shown


@pytest.fixture
def run_here(run, monkeypatch, tmp_path):
    """run_here(url, *arguments): in this process, which is quicker; what does not download."""

    def call(url, *arguments):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        return run("models", *arguments)

    return call


def test_what_the_hub_has_not(hub, run_here):
    for name, message in (
        ("hf:owner/repo:Q6_K", "owner/repo has no model of type Q6_K; there is model.gguf."),
        ("hf:owner/none:Q8_0", "the hub has no 'hf:owner/none', or not for everybody; check the name, or run"),
    ):
        result = run_here(hub.url, "fetch", name)
        (line,) = result.err.splitlines()
        assert result.code == 1 and message in line
    result = run_here("http://127.0.0.1:9", "pair", "hf:owner/repo")
    (line,) = result.err.splitlines()
    assert result.code == 1 and line.startswith("Error: the hub cannot be reached (")


def test_a_pair(hub, run_here, monkeypatch):
    target, draft = "hf:Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0"
    result = run_here(hub.url, "pair", "hf:Qwen/Qwen2.5-7B-Instruct-GGUF")
    assert result.code == 0
    assert result.out.splitlines() == [
        f"target  {target}  4.7 GB, apache-2.0, 2 files",
        f"draft   {draft}  675.7 MB, apache-2.0",
    ]
    assert f"  pyfly-cpp models fetch {target} {draft}\n  pyfly-cpp chat -m {target} -d {draft}\n" in result.err
    shown = json.loads(run_here(hub.url, "pair", "hf:Qwen/Qwen3-8B-GGUF:Q6_K", "--json").out)
    assert shown["target"]["files"][0]["name"] == "Qwen3-8B-Q6_K.gguf"
    assert shown["draft"]["files"][0]["sha256"].startswith("9465e63a22add535")
    monkeypatch.setattr(models_command, "MOST_SHARE", 0.1)
    result = run_here(hub.url, "pair", "hf:Qwen/Qwen2.5-7B-Instruct-GGUF")
    assert result.out.splitlines() == [f"target  {target}  4.7 GB, apache-2.0, 2 files"]
    assert f"{draft} (675.7 MB) is too large to draft for it: more than 10% of its size." in result.err
