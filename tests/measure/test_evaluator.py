"""What measures in a process of its own: benchmarks/evaluator.py, and child.py, which asks it."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import llama_cpp
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import child
import evaluator


@pytest.mark.parametrize("cache", [llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_Q8_0])
def test_a_filled_cache(tiny_target, monkeypatch, cache):
    """It has the tokens that were read as often as they fit, each at a position of its own; what follows is the same
    alone and in batches."""
    monkeypatch.setattr(evaluator, "MOST_BATCH", 32)
    options = {"model_path": tiny_target, "n_ctx": 256, "n_threads": 1, "type_k": cache, "type_v": cache}
    one = evaluator.Evaluator("auto", options)
    one.read(150, fill=True)
    state, first = one._state(), one._state()[16 : 16 + 12 * 150]
    assert [position for position, *_ in struct.iter_unpack("<iIi", first)] == list(range(150))
    one.read(32, fill=True)
    assert evaluator.repeated(one._state(), 32, 150) == state
    one.read(150, fill=True)
    assert one.seconds(8) > 0 and (one.difference(8) == 0 or one.about["inexact"])
    with pytest.raises(SystemExit, match="leave out --fill"):
        evaluator.repeated(state, 149, 200)


def test_what_may_differ_in_batches_is_told(tiny_target):
    """Types that seemed slower on this machine are left to llama.cpp, and a record has no other trace of it."""
    one = evaluator.Evaluator("stock", {"model_path": tiny_target, "n_ctx": 64, "n_threads": 1})
    assert any("(F16)" in why for why in one.about["inexact"])


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise SystemExit(3)", "has ended"), ("os.kill(os.getpid(), signal.SIGILL)", "crashed (SIGILL)")],
)
def test_a_process_that_ended_says_how(tmp_path, code, said):
    script = tmp_path / "side.py"
    script.write_text(f"import os, signal\ninput()\n{code}\n")
    with pytest.raises(SystemExit, match=re.escape(said)):
        child.Child(str(script), ["llama.cpp"], {})
