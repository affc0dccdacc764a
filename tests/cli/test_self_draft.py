"""`models draft`: what is written, what is printed, and what is refused."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest

from pyfly_cpp import DraftModel, FlyLlama
from pyfly_cpp.cli import self_draft

from .conftest import TARGET


@pytest.fixture
def target(tmp_path):
    return Path(shutil.copy(TARGET, tmp_path / "a target.gguf"))


def names(target):
    return sorted(os.listdir(target.parent))


def test_a_draft_is_made(run, target):
    result = run("models", "draft", target)
    draft = target.with_name("a target.draft-Q4_K_M.gguf")
    assert result.code == 0, result.err
    assert names(target) == sorted([target.name, draft.name])
    assert draft.stat().st_size < target.stat().st_size / 2
    fly = FlyLlama(str(target), drafter=DraftModel(draft, draft_max=3), n_ctx=256, n_threads=1, verbose=False)
    fly("Natalia sold", max_tokens=20, temperature=0)
    assert fly.stats.matched > 5
    fly.close()
    printed = shlex.split(result.out.splitlines()[-1])
    assert printed == ["pyfly-cpp", "bench", "-m", str(target), "-d", str(draft)]
    assert run(*printed[1:], "-n", 4, "--limit", 1, "-c", 256, "-t", 1).code == 0
    before = draft.stat().st_mtime_ns
    again = run("models", "draft", target)
    assert again.code == 1 and "exists already" in again.err and draft.stat().st_mtime_ns == before
    assert run("models", "draft", target, "--force").code == 0 and draft.stat().st_mtime_ns > before


def test_a_draft_of_a_model_that_another_program_keeps(run, tmp_path, monkeypatch):
    """`hf:OWNER/REPO` means what lies in the hub's folder, so no draft may lie there."""
    monkeypatch.setenv("PYFLY_MODELS", str(tmp_path / "mine"))
    folder = tmp_path / "models--owner--repo" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    shutil.copy(TARGET, folder / "t.gguf")
    result = run("models", "draft", folder / "t.gguf")
    assert result.code == 0, result.err
    assert os.listdir(folder) == ["t.gguf"] and os.listdir(tmp_path / "mine") == ["t.draft-Q4_K_M.gguf"]


@pytest.mark.parametrize("name", self_draft._TYPES)
def test_every_type(run, target, tmp_path, name):
    draft = tmp_path / "d.gguf"
    assert run("models", "draft", target, "--type", name.lower(), "-o", draft).code == 0
    assert draft.stat().st_size < 1.3 * self_draft._size(target, name), "the vocabulary of a model of 2 MB weighs"
    assert self_draft._size(target, name) < target.stat().st_size / 2


def test_a_draft_of_a_draft(run, target):
    """Quantised files, too; but not to what is no smaller."""
    assert run("models", "draft", target).code == 0
    draft = target.with_name("a target.draft-Q4_K_M.gguf")
    again = run("models", "draft", draft)
    assert again.code == 1 and "hardly larger than its Q4_K_M draft" in again.err
    advice = [run("models", "pair", one).err for one in (target, draft)]
    assert ["It can also draft for itself" in one for one in advice] == [True, False], "only what would be taken"
    assert run("models", "draft", draft, "--type", "Q2_K").code == 0


def test_it_replaces_no_model_that_it_reads(run, target, monkeypatch):
    monkeypatch.chdir(target.parent)
    for output in (target, target.name):
        result = run("models", "draft", target, "-o", output, "--force")
        assert result.code == 1 and "choose another --output" in result.err
    assert target.stat().st_size == TARGET.stat().st_size


def test_a_full_disk_is_noticed_first(run, target, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    result = run("models", "draft", target)
    assert result.code == 1 and "write to another disk with --output" in result.err
    assert names(target) == [target.name]


def test_a_quantiser_that_fails_or_is_interrupted_leaves_nothing(run, target, monkeypatch):
    monkeypatch.setitem(self_draft._TYPES, "Q4_0", self_draft._Type(999, 4.9))
    result = run("models", "draft", target, "--type", "Q4_0")
    assert result.code == 1 and "could not quantise 'a target.gguf' to Q4_0" in result.err
    assert names(target) == [target.name]

    def interrupt(source, destination, *_):
        Path(destination).write_bytes(b"GGUF")
        raise KeyboardInterrupt

    monkeypatch.setattr(self_draft, "quantize", interrupt)
    assert run("models", "draft", target).code == 130
    assert names(target) == [target.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.gguf"], "there is no model file"),
        ([__file__], "is not a GGUF file"),
        ([TARGET, "--type", "Q5"], "is not one of 'q2_k', 'q3_k_s', 'q4_0', 'q4_k_m'"),
        ([TARGET, "-o", "/dev/null", "--force"], "is a device"),
    ],
)
def test_what_is_refused(run, arguments, message):
    result = run("models", "draft", *arguments)
    assert result.code in (1, 2) and message in result.err
