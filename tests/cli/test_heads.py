"""`pyfly-cpp heads train` in this process, on the tiny target."""

from __future__ import annotations

import importlib.util
import json
import os
from types import SimpleNamespace

import pytest

from cli.conftest import TARGET
from pyfly_cpp.cli.heads_command import _show
from pyfly_cpp.heads.texts import Text
from pyfly_cpp.heads.training import Speeds, Trained

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


def test_a_head_that_is_not_worth_it_is_moved_only_from_where_it_is_used(capsys, tmp_path):
    speeds = Speeds(plain=1.0, without_head=2.0, with_head=1.5)
    for folder, is_used in ((tmp_path, True), (tmp_path / "x" / "..", True), (tmp_path / "heads", False)):
        (tmp_path / "x").mkdir(exist_ok=True)
        plan = SimpleNamespace(target=tmp_path / "target.gguf", output=folder / "head.gguf")
        _show(plan, Trained(plan.output, 1, (0.5,), {}, speeds))
        last = capsys.readouterr().out.splitlines()[-1]
        assert ("head.gguf" in last and str(tmp_path) in last) == is_used and "not worth it" in last


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
