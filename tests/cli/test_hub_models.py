"""`models fetch hf:...` against a local server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

CONTENT = os.urandom(24 << 20)  # more than two of the pieces that huggingface_hub writes
COMMIT = "c" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Serves one file. `stalls_at`, `breaks_at`: sends so many bytes of it and no more; once."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.sha256 = hashlib.sha256(CONTENT).hexdigest()
        self.stalls_at = self.breaks_at = None
        self.ranges = []  # that were asked for

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(is_head=True)

    def do_GET(self):
        self.answer(is_head=False)

    def answer(self, is_head):
        hub = self.server
        if self.path != "/owner/repo/resolve/main/model.gguf" and COMMIT not in self.path:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            return
        begin = 0
        if not is_head:
            hub.ranges.append(self.headers.get("Range"))
            if self.headers.get("Range"):
                begin = int(self.headers["Range"].split("=")[1].split("-")[0])
        body = CONTENT[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hub.sha256}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.end_headers()
        if is_head:
            return
        if hub.stalls_at is not None or hub.breaks_at is not None:
            self.wfile.write(body[: hub.stalls_at or hub.breaks_at])
            self.wfile.flush()
            time.sleep(60 if hub.stalls_at else 0)
            hub.breaks_at = None
            return
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def start(home, url, *arguments):
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
    for name in ("HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-m", "pyfly_cpp", "models", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
    hub.sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert fetch(tmp_path, hub.url)[0] == 0


def test_no_such_file(hub, tmp_path):
    code, _, err = fetch(tmp_path, hub.url, "hf:owner/repo/other.gguf")
    assert code == 1 and "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("Error")]
    assert "the hub did not give 'hf:owner/repo/other.gguf'" in line


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = fetch(tmp_path, "http://127.0.0.1:9")
    assert code == 1 and "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("Error: the hub cannot be reached (")
    assert line.endswith("is not here; check the network, or give --model the path of a file.")
