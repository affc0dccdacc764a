"""`pyfly-cpp heads train` in this process, on the tiny target."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from cli.conftest import TARGET
from pyfly_cpp.heads.texts import Text

TOKENS = ("--tokens", 2000)


def test_without_pytorch_the_error_names_the_extra(run, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "torch" else found(name))
    result = run("heads", "train", TARGET, "-o", tmp_path / "head.gguf", "--yes")
    assert result.code == 1 and "torch" in result.err and "pip install 'pyfly-cpp[train]'" in result.err


def test_nothing_is_written_unasked(run, tmp_path):
    pytest.importorskip("torch")
    result = run("heads", "train", TARGET, "-o", tmp_path / "out" / "head.gguf", *TOKENS)
    assert result.code == 2 and "allow it with --yes" in result.err and "2000 tokens" in result.err
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.slow
def test_a_head_is_trained_and_its_use_is_shown(run, tmp_path):
    pytest.importorskip("torch")
    head = tmp_path / "head.gguf"
    command = ("heads", "train", TARGET, "-o", head, *TOKENS, "--hours", 0.02, "--yes", "-t", 1)
    result = run(*command)
    assert result.code == 0, result.err
    assert "tokens/s without drafts" in result.out and "other: right at depth 1, 2, 3" in result.out
    use = f"pyfly-cpp chat -m {TARGET} --drafter lookup+eagle3 -d {head}"
    assert (use in result.out) != ("not worth it" in result.out)
    again = run(*command, "--json")  # nothing is left to do but to measure
    assert again.code == 0, again.err
    n_texts = sum(len(text.tokens) for text in Text.read(tmp_path / "head.gguf.work" / "texts.jsonl"))
    assert n_texts / 2 <= json.loads(again.out)["n_tokens"] < n_texts  # the others are held out
