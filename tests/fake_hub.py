"""A local server that speaks the hub's protocol: listings of repositories, and the files of one."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

COMMIT = "c" * 40
LISTINGS = json.loads((Path(__file__).parent / "data" / "hub_listings.json").read_text())
"""What the hub answers about repositories, by their names (tests/data/README.md)."""


class Hub(http.server.ThreadingHTTPServer):
    """Answers for `listings`, and serves `files` of owner/repo by their names. `stalls_at`, `breaks_at`: sends so many
    bytes of a file and no more; once. `sha256`: what it says of every file, where that is not the truth."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.sha256 = None
        self.stalls_at = self.breaks_at = None
        self.ranges = []  # that were asked for
        self.listings = {**LISTINGS, "owner/repo": {"id": "owner/repo", "tags": ["license:mit"], "siblings": []}}

    def said(self, name):
        """The SHA-256 that it names for a file."""
        return self.sha256 or hashlib.sha256(self.files[name]).hexdigest()

    def listing(self, repo):
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": self.said(name), "size": len(data), "pointerSize": 9},
            }
            for name, data in self.files.items()
        ]
        return {**self.listings[repo], "siblings": siblings} if repo == "owner/repo" else self.listings[repo]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(is_head=True)

    def do_GET(self):
        self.answer(is_head=False)

    def answer(self, is_head):
        hub, path = self.server, self.path.partition("?")[0]
        repo = path[len("/api/models/") :]
        if path.startswith("/api/models/") and repo in hub.listings:
            self.listing(json.dumps(hub.listing(repo)).encode())
            return
        name = next(
            (name for name in hub.files if path in (f"/owner/repo/resolve/{at}/{name}" for at in ("main", COMMIT))),
            None,
        )
        if name is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound" if path.startswith("/api/") else "EntryNotFound")
            self.end_headers()
            return
        self.file(hub, name, is_head)

    def listing(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def file(self, hub, name, is_head):
        content = hub.files[name]
        begin = 0
        if not is_head:
            hub.ranges.append(self.headers.get("Range"))
            if self.headers.get("Range"):
                begin = int(self.headers["Range"].split("=")[1].split("-")[0])
        body = content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hub.said(name)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
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


@contextmanager
def fake_hub(files):
    """A running server of `files`: contents by names."""
    server = Hub(files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
