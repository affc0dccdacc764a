"""Sweeps of a threshold, and the presets they write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyfly_cpp import Entropy, Margin, PromptLookup
from pyfly_cpp.decoding import EXACT, Decoding
from pyfly_cpp.decoding.gates import Relaxed
from pyfly_cpp.decoding.presets import load_preset, save_preset
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.machine.prompt_sets import read_prompts
from pyfly_cpp.measure import plot, report
from pyfly_cpp.measure.runner import measure
from pyfly_cpp.measure.speed import summarise
from pyfly_cpp.measure.statistics import Interval
from pyfly_cpp.measure.sweep import THRESHOLDS, Point, agreement, fastest, make_preset, points_of, read_sweep


def test_agreement():
    assert agreement([], []) == 1 and agreement([1, 2], []) == 0 and agreement([1, 2, 3], [1, 2, 3]) == 1
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.75


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_agreement_is_a_share(a, b):
    assert 0 <= agreement(a, b) <= 1 and agreement(a, a) == 1


def test_what_is_swept():
    assert read_sweep("margin:0.1,0.3, 1,0.3") == {0.1: Margin(0.1), 0.3: Margin(0.3), 1.0: Margin(1.0)}
    assert read_sweep("relaxed:0.6") == {0.6: Relaxed(delta=0.6)}, "the first number is a count"
    assert list(read_sweep("entropy").values()) == [Entropy(theta) for theta in THRESHOLDS["entropy"]]
    assert all(list(read_sweep(word)) == list(THRESHOLDS[word]) for word in THRESHOLDS)


@pytest.fixture(scope="module")
def swept(generator):
    gates = read_sweep("margin:0.3,3").values()
    rows = measure(generator, read_prompts()[:5], [EXACT, *(Decoding(gate) for gate in gates)], 24)
    return rows, points_of(rows, gates)


def test_points(swept):
    rows, (exact, strict, loose) = swept
    assert [exact.setting, strict.setting, loose.setting] == ["exact", "margin:0.3", "margin:3"]
    assert exact.agreement == Interval(1, 1, 1) and exact.speedup == 1
    mine, theirs = ([m.result.tokens for m in rows if m.setting == name] for name in ("margin:3", "exact"))
    by_id = [{m.prompt.id: m.result.tokens for m in rows if m.setting == name} for name in ("margin:3", "exact")]
    shares = [agreement(by_id[0][name], by_id[1][name]) for name in by_id[0]]
    assert len(mine) == len(theirs) == 5 and loose.agreement.estimate == pytest.approx(sum(shares) / 5)
    assert strict.agreement.estimate >= loose.agreement.estimate
    head, body = report.sweep_cells([exact, strict, loose])
    assert [len(row) for row in body] == [len(head)] * 3 and "[" in body[2][-1]


def test_a_sweep_is_a_picture(swept):
    pytest.importorskip("matplotlib")
    rows, points = swept
    assert plot.plot(rows, "Speed", points).startswith(b"\x89PNG")


def test_the_fastest_that_agrees_enough_is_clearly_faster_than_exact(swept):
    rows, _ = swept
    one = summarise(rows)[0]

    def point(setting, speed, low, agrees):
        over = None if setting == "exact" else Interval(speed, low, 2 * speed)
        return Point(dataclasses.replace(one, setting=setting, speedup_exact=over), Interval(agrees, 0, 1))

    points = [point("exact", 1, 1, 1), point("margin:0.1", 1.1, 1.05, 0.99), point("margin:0.3", 1.2, 1.1, 0.95),
              point("margin:0.6", 1.5, 0.9, 0.94), point("margin:1", 1.4, 1.3, 0.5)]  # fmt: skip
    for least, wanted in ((0.0, "margin:1"), (0.9, "margin:0.3"), (0.98, "margin:0.1"), (1.0, "exact")):
        assert fastest(points, least).setting == wanted
    unknown = [points[0], point("margin:0.1", 1.3, float("nan"), 1.0)]
    assert fastest(unknown, 0.5).setting == "exact", "of few prompts nothing is sure"


def test_what_a_sweep_writes_keeps_the_memory_of_prompt_lookup_and_finds_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = PromptLookup(3, memory_file="mine.bin", texts=("a.txt", "b"))
    for drafters in (Resolved(given=(given,)), Resolved((given,))):
        (found,) = make_preset(Decoding.parse("exact k=4 lookup"), "t.gguf", drafters, {}).drafters
        assert found == PromptLookup(
            3, memory_file=str(tmp_path / "mine.bin"), texts=(str(tmp_path / "a.txt"), str(tmp_path / "b"))
        )
    assert make_preset(Decoding.parse("exact lookup"), "t.gguf", Resolved((PromptLookup(),)), {}).drafters == (
        PromptLookup(),
    )


@pytest.mark.parametrize("text", ["margin:0.3 k=4", "entropy:0.3 k=8 lookup", "margin:0.5 agree:2 tail=3 k=8", "exact"])
def test_what_a_sweep_writes_reads_back_as_the_same_setting(text, tmp_path):
    """With the window spelled out: what was measured holds, whatever a gate's own window may be one day."""
    pytest.importorskip("click")
    from pyfly_cpp.cli.loading import Models
    from pyfly_cpp.cli.measuring import preset_settings

    setting = Decoding.parse(text)
    preset = make_preset(setting, "t.gguf", Resolved((PromptLookup(),)), {})
    assert preset.decoding.window == (None if text == "exact" else setting.window or setting.gate.window)
    save_preset(preset, tmp_path / "p.json")
    (read,) = preset_settings(Models(Path("t.gguf"), None, "auto", load_preset(tmp_path / "p.json"), {}, {}))
    assert read == dataclasses.replace(setting, drafter=None)
