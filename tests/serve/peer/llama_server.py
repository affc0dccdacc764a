"""Stands in for llama-server: takes its flags, and is `pyfly-cpp serve` with the models of the tests.

A flag that has no counterpart ends it, so that a test which needs one fails where its server starts.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

from pyfly_cpp.cli import cli
from pyfly_cpp.serve import server  # noqa: F401  # before the fork
from pyfly_cpp.serve.grammars import Grammars

MODEL = "PYFLY_PEER_MODEL"
_N_SLOTS = 4  # where a test names no number

# Flags with a value, and ours; None: there is nothing to choose.
_VALUES = {
    "--port": "--port", "--host": "--host", "--temp": "--temperature", "--seed": "--seed", "--alias": "--alias",
    "--tags": "--tags", "--api-key": "--api-key", "--pooling": "--pooling", "--chat-template": "--chat-template",
    "--chat-template-file": "--chat-template-file", "--batch-size": "--n-batch", "--spec-draft-n-max": "--draft-max",
    **dict.fromkeys(("--hf-repo", "--hf-file", "--model", "--model-url", "--threads", "--ubatch-size", "-fa")),
    **dict.fromkeys(("--spec-type", "--spec-draft-n-min")),
}  # fmt: skip
_SWITCHES = {
    "--embedding": "--embeddings",
    **dict.fromkeys(
        ("--offline", "--cont-batching", "--jinja", "--no-jinja", "--slots", "--no-slots", "--verbose", "--metrics")
    ),
}


def translated(given: list[str]) -> list[str]:
    """Arguments of `pyfly-cpp serve`. Raises KeyError: a flag is unknown."""
    out = ["--model", os.environ[MODEL], "--n-threads", "1", "--grace", "1"]
    drafts = ["--drafter", "none"]
    n_ctx, n_slots, is_unified = 0, _N_SLOTS, False
    flags = iter(given)
    for flag in flags:
        if flag == "--kv-unified":
            is_unified = True
        elif flag == "--ctx-size":
            n_ctx = int(next(flags))
        elif flag == "--parallel":
            n_slots = int(next(flags))
        elif flag == "--n-predict":
            out += ["--max-tokens", str(max(0, int(next(flags))))]
        elif flag == "--model-draft":
            drafts = ["--draft", next(flags), "--no-adaptive"]
        elif flag == "--reasoning":
            out += ["--reasoning-budget", "0"] if next(flags) == "off" else []
        elif flag in _SWITCHES:
            out += [_SWITCHES[flag]] if _SWITCHES[flag] else []
        else:
            name, value = _VALUES[flag], next(flags)
            out += [name, value] if name else []
    return [*out, *drafts, "--parallel", str(n_slots), "--n-ctx", str(n_ctx if is_unified else n_ctx // n_slots)]


class Popen:
    """As of subprocess, for the suite: a fork, which need not import all again."""

    def __init__(self, arguments: list[str], **_: object) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(arguments[1:],))
        self._process.start()
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("serve", timeout or 0)
        return self.returncode


def _serve(given: list[str]) -> None:
    Grammars.start = lambda self: None  # type: ignore[method-assign]  # most tests need none
    try:
        arguments = translated(given)
    except KeyError as flag:
        sys.exit(f"pyfly-cpp serve has no {flag}")
    cli.main(["serve", *arguments])
