"""Architectures that people use, with random weights that llama.cpp itself creates: what is committed is what a fresh
evaluation chooses, whatever is drafted and rejected, alone and together. `-m archs` runs this for all of them."""

from __future__ import annotations

import pytest
from described import POPULAR, make
from trials import TRIALS, World, tolerance

FIRST = ("llama", "qwen35", "gemma3", "deepseek2", "lfm2")
"""One of each kind of memory; the others are built as these are."""


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in POPULAR])
def test_tokens_are_those_of_a_fresh_evaluation(name, tmp_path):
    world = World(str(make(name, POPULAR[name], tmp_path / "model.gguf")))
    assert world.sensitivity() > 100 * tolerance("exact")  # else a wrong cache would not show
    for trial in ("exact", "margin", "batch_margin", "states", "prefix", "edge"):
        outcome = TRIALS[trial](world)
        assert max(outcome["gap"], outcome["logprob"]) < tolerance(trial), trial
        assert outcome["matched"] > 5
        assert outcome["loose"] > 0 or "margin" not in trial
    world.close()
