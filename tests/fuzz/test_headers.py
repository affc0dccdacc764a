"""Files with a corrupted header: they load and generate, or are refused in one sentence; the process goes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fuzz

PROGRAM = Path(__file__).parent / "load_corrupted.py"
PATHS = [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, PATHS)),
    "GGML_NO_BACKTRACE": "1",  # it would take a debugger, and seconds
}
SECONDS = 20
"""A case that takes longer hangs."""


def run(seeds, folder):
    """Yields (seed, role, outcome) of each. A child works through them; where one ends it, another child goes on."""
    left = list(seeds)
    while left:
        with open(Path(folder) / "stderr", "w+b") as stderr, subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1,
            env=ENVIRONMENT,
        ) as child:  # fmt: skip
            limit = 6 * SECONDS  # the first one also imports
            while left:
                seed = left.pop(0)
                child.stdin.write(f"{seed}\n")
                if not select.select([child.stdout], [], [], limit)[0]:
                    child.kill()
                    yield seed, "?", f"FAILED hangs ({limit} s)"
                    break
                line = child.stdout.readline()
                if not line:
                    stderr.seek(max(0, stderr.tell() - 300))
                    said = stderr.read().decode(errors="replace").strip().rsplit("\n", 1)[-1]
                    code = child.wait()
                    why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
                    yield seed, "?", f"FAILED {why}: {said}"
                    break
                yield seed, *line.rstrip("\n").split("\t", 2)[1:]
                limit = SECONDS
            child.stdin.close()


def test_corrupted_headers(cases, tmp_path):
    failures = [case for case in run(cases(300), tmp_path) if case[2].startswith("FAILED")]
    assert not failures, "PYFLY_FUZZ_SEED=... repeats one: " + "; ".join(map(str, failures))
