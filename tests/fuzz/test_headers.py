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


def run(seeds, folder, *roles):
    """Yields (seed, role, outcome) of each. A child works through them; where one ends it, another child goes on."""
    left = list(seeds)
    while left:
        with open(Path(folder) / "stderr", "w+b") as stderr, subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), *roles],
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


FOUND = (38, 47, 73, 137, 179, 199, 251, 275, 310, 485, 1006, 1034, 1214, 1592, 2863, 3120, 3612, 4050, 7311, 7339,
         10166)  # fmt: skip
"""What ended the process, or hung, when this was written; see also test_hostile_headers.py, which spells them out."""


def require_no_failures(seeds, folder, *roles):
    found = [case for case in run(seeds, folder, *roles) if case[2].startswith("FAILED")]
    assert not found, "PYFLY_FUZZ_SEED=... repeats one: " + "; ".join(map(str, found))


def test_corrupted_headers(cases, tmp_path):
    require_no_failures(cases(300), tmp_path)


def test_corrupted_heads_that_draft_blocks(cases, tmp_path):
    require_no_failures(cases(20), tmp_path, "DFlash head", "DSpark head")


def test_headers_that_once_ended_the_process(tmp_path):
    require_no_failures(FOUND, tmp_path)
