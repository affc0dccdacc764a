"""A draft of a model made of itself: what is chosen, what is left on the disk, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from pyfly_cpp import FlyLlama
from pyfly_cpp._native import Costs
from pyfly_cpp.bench import self_draft
from pyfly_cpp.bench.self_draft import KINDS, Observations, make_draft, plan_draft, weigh
from pyfly_cpp.cli import main
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.files import OutputError

THREADS = {"n_threads": 1, "n_threads_batch": 1}


@pytest.fixture
def target(tiny_target, tmp_path):
    return Path(shutil.copy(tiny_target, tmp_path / "target.gguf"))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(self_draft, "MAX_TOKENS", 8)


def costs(target_us, draft_us):
    """Batches of n tokens cost target_us(n), drafts of k tokens draft_us * k."""
    return Costs(
        tuple((n, target_us(n)) for n in (1, 2, 3, 4, 6, 8)),
        tuple((0, 1, k, draft_us * k) for k in (1, 2, 4, 6)),
        (0.0,),
    )


def test_what_a_candidate_is_worth():
    """Batches as dear as one token, drafts that cost a tenth: by hand."""
    right = (0.9, 0.8, 0.7, 0.1, 0.0, 0.0)
    (trial,) = weigh({KINDS["q4_0"]: Observations(5, right, costs(lambda n: 1000.0, 100.0))}).values()
    expected = {k: (1 + sum(right[:k])) / (1000 + 100 * k) * 1e6 for k in range(1, 7)}
    assert trial.draft_max == max(expected, key=expected.get) == 3
    assert trial.speed == pytest.approx(expected[3]) and trial.gain == pytest.approx(expected[3] / 1000)
    assert (trial.target_ms, trial.draft_ms, trial.n_bytes) == (1.0, pytest.approx(0.1), 5)


def test_the_shortest_time_of_the_target_counts_for_all():
    fast, slow = costs(lambda n: 1000.0 + n, 100.0), costs(lambda n: 9000.0, 100.0)
    trials = weigh({KINDS["q4_0"]: Observations(1, (0.9,), slow), KINDS["q2_k"]: Observations(1, (0.5,), fast)})
    a, b = trials.values()
    assert a.target_ms == b.target_ms == 1.001
    assert a.draft_ms == pytest.approx(0.1 * 1.001 / 9.0) and b.draft_ms == pytest.approx(0.1)
    assert a.gain > b.gain


def test_the_smallest_is_not_the_best():
    """Q2_K drafts faster, and worse."""
    trials = weigh({
        KINDS["q4_0"]: Observations(2, (0.92, 0.88, 0.84), costs(lambda n: 176e3 + 5e3 * n, 70e3)),
        KINDS["q2_k"]: Observations(1, (0.84, 0.74, 0.62), costs(lambda n: 176e3 + 5e3 * n, 69e3)),
    })  # fmt: skip
    assert trials[KINDS["q4_0"]].gain > trials[KINDS["q2_k"]].gain > 1


def test_a_draft_is_made(target, short):
    seen = []
    plan = plan_draft(target, kinds=["q4_0", "q2_k"])
    assert not plan.is_quantised
    found = make_draft(plan, keep=True, on_progress=lambda what, done: seen.append(what), **THREADS)
    assert [trial.kind for trial in found.trials] == ["q4_0", "q2_k"]
    assert found.path == target.with_name(f"target.draft-{found.best.kind}.gguf")
    assert sorted(os.listdir(target.parent)) == sorted([target.name, found.path.name])
    assert found.best.n_bytes == found.path.stat().st_size < target.stat().st_size / 2
    assert all(0 < trial.acceptance[0] <= 1 and 1 <= trial.draft_max <= 6 for trial in found.trials)
    assert "q4_0: quantising" in seen and "q2_k: drafting" in seen
    from pyfly_cpp import DraftModel

    fly = FlyLlama(str(target), drafter=DraftModel(found.path, draft_max=3), n_ctx=256, verbose=False, **THREADS)
    fly("Natalia sold", max_tokens=20, temperature=0)
    assert fly.stats.matched > 5
    with pytest.raises(OutputError, match="exists already"):
        plan_draft(target, kinds=[found.best.kind])


def test_one_that_does_not_pay_is_not_kept(target, short, monkeypatch):
    monkeypatch.setattr(self_draft, "PAYS", 1e9)
    found = make_draft(plan_draft(target, kinds=["q4_0"]), **THREADS)
    assert found.path is None and os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("when", ["loading", "q4_0: quantising", "q4_0: drafting", "measuring"])
def test_an_interrupt_leaves_nothing(when, target, short):
    def interrupt(what, done):
        if when in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_draft(plan_draft(target, kinds=["q4_0"]), on_progress=interrupt, **THREADS)
    assert os.listdir(target.parent) == [target.name]


def test_a_quantiser_that_fails_leaves_nothing(target, monkeypatch):
    monkeypatch.setitem(KINDS, "q4_0", self_draft.Kind("q4_0", 999, 4.9))
    with pytest.raises(PyflyError, match=r"could not make 'target.gguf' q4_0"):
        make_draft(plan_draft(target, kinds=["q4_0"]), **THREADS)
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "missing.gguf"}, "cannot be read"),
        ({"target": __file__}, "is not a GGUF file"),
        ({"source": "missing.gguf"}, "cannot be read"),
        ({"kinds": ["q5"]}, "the type 'q5' is unknown; the types are q4_0, q2_k"),
        ({"kinds": []}, "no type is given"),
        ({"output": "/dev/null"}, "is a device"),
    ],
)
def test_what_cannot_be_planned(change, message, target):
    with pytest.raises(ValueError, match=message):
        plan_draft(**{"target": target, **change})


def test_a_draft_replaces_no_model_that_it_needs(target, tmp_path, monkeypatch):
    monkeypatch.chdir(target.parent)
    source = shutil.copy(target, tmp_path / "source.gguf")
    for output in (target, target.name, source):
        with pytest.raises(ValueError, match="choose another --output"):
            plan_draft(target, source=source, output=output, kinds=["q4_0"], force=True)


def test_another_model_is_no_better_form(target, tiny_draft, tiny_qwen35):
    for other in (tiny_draft, tiny_qwen35):
        with pytest.raises(ValueError, match="is another model than"):
            plan_draft(target, source=other)


def test_a_full_disk_is_noticed_first(target, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OutputError, match="write to another disk with --output"):
        plan_draft(target)


# ---- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return left.value.code or 0, out, err

    return call


def test_the_command(target, short, run, monkeypatch):
    monkeypatch.setattr(self_draft, "PAYS", 0.0)
    code, out, err = run("models", "draft", target, "--types", "q4_0", "--yes", "-t", 1)
    assert code == 0, err
    assert f"pyfly-cpp chat -m {target} -d {target.with_name('target.draft-q4_0.gguf')}" in out
    assert "Up to 3.4 MB in" in err and "already quantised" not in err
    draft = target.with_name("target.draft-q4_0.gguf")
    code, out, err = run("models", "draft", draft, "--types", "q2_k", "--yes", "-t", 1, "--json", "--from", target)
    assert code == 0, err
    assert json.loads(out)["best"] == "q2_k" and "already quantised" not in err
    code, _, err = run("models", "draft", draft, "--types", "q4_k_m", "--yes", "-t", 1)
    assert code == 1 and "is as small as q4_k_m" in err


def test_nothing_is_written_unasked(target, run):
    code, _, err = run("models", "draft", target, "-t", 1)
    assert code == 2 and "there is nobody to ask; allow it with --yes" in err
    assert os.listdir(target.parent) == [target.name]


def test_a_target_that_is_quantised_already(target, tmp_path, run):
    from pyfly_cpp.machine.programs import quantize

    quantize(target, tmp_path / "q8.gguf", 7, lambda: None, "cannot")
    assert plan_draft(tmp_path / "q8.gguf").is_quantised
    assert not plan_draft(tmp_path / "q8.gguf", source=target).is_quantised
    code, _, err = run("models", "draft", tmp_path / "q8.gguf")
    assert code == 2 and "already quantised: a draft made from it loses quality twice" in err
