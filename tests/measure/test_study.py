"""benchmarks/study.py: which items are answered, checks of instructions, the comparison with exact answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import study  # noqa: E402

from pyfly_cpp.machine.rows import Where  # noqa: E402


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ({"words": [2, 4]}, ["a b", "a b\nc  d", "```\na b\n```"], ["a", "a b c d e", ""]),
        ({"lines": 2}, ["a\n\nb", " a\nb\n"], ["a", "a\nb\nc", ""]),
        ({"numbered": 2}, ["1. a\n2. b", "1.  a\n\n2. b\n"], ["1. a\n3. b", "a\nb", "1) a\n2) b", "1.\n2. b"]),
        ({"prefix": "- "}, ["- a\n- b"], ["- a\nb", "* a", "-a"]),
        ({"sentences": 2}, ["One. Two!", 'She said "no." (He did not.)', "It is 3.5 m. So!"], ["One.", "One. Two", ""]),
        ({"contains": ["river", "because"]}, ["Because of the River."], ["rivers because", "because", ""]),
        ({"lacks": ","}, ["a b"], ["a, b"]),
        (
            {"csv": {"columns": ["name", "size"], "rows": 2}},
            ["name,size\na,1\nb,2", "Name, Size\na, 1\nb, 2", "```csv\nname,size\na,1\nb,2\n```"],
            ["name,size\na,1", "name,size\na,1\nb", "name,size\na,1\nb,", "size,name\na,1\nb,2", ""],
        ),
        (
            {"json": {"n": "whole", "x": "number", "t": "text", "b": "truth", "l": 2, "s": ["new", "old"]}},
            ['{"n": 1, "x": 1.5, "t": "", "b": true, "l": ["a", "b"], "s": "new"}'],
            [
                '{"n": 1.5, "x": 1.5, "t": "", "b": true, "l": ["a", "b"], "s": "new"}',
                '{"n": true, "x": 1.5, "t": "", "b": true, "l": ["a", "b"], "s": "new"}',
                '{"n": 1, "x": 0, "t": "", "b": true, "l": ["a", "b"], "s": "new"}',
                '{"n": 1, "x": 1.5, "t": 1, "b": 1, "l": ["a", "b"], "s": "new"}',
                '{"n": 1, "x": 1.5, "t": "", "b": true, "l": ["a"], "s": "new"}',
                '{"n": 1, "x": 1.5, "t": "", "b": true, "l": ["a", 1], "s": "new"}',
                '{"n": 1, "x": 1.5, "t": "", "b": true, "l": ["a", "b"], "s": "lost"}',
                '{"n": 1}', "[1]", "{", "",
            ],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_holds(check, good, bad):
    item = study.Instructions().parse(Where("made up", 1, {"id": "a", "prompt": "b", "checks": check}))
    for text in good:
        assert study.Instructions().score(item, text, []).correct, text
    for text in bad:
        assert study.Instructions().score(item, text, []).extracted == next(iter(check)), text


def test_a_smaller_limit_takes_the_first_items_and_parts_take_turns():
    few, many = (study.read_items("instructions", Path(), {"instructions": (0, n)}) for n in (4, 9))
    assert study.read_items("instructions", Path(), {"instructions": (4, 9)}) == many[4:]
    assert many[:4] == few and len(study.read_items("instructions", Path(), {})) == 100
    found = [(part, begin, len(some)) for part, begin, some in study.chunks({"a": few, "b": many}, 4)]
    assert found == [("a", 0, 4), ("b", 0, 4), ("b", 4, 4), ("b", 8, 1)]


def test_rules_are_settings_or_presets():
    assert str(study.read_rule("margin:0.3", 8)) == "margin:0.3 k=8"
    assert str(study.read_rule("entropy:0.3 agree:4 k=15", 8)) == "entropy:0.3 agree:4 k=15"
    assert str(study.read_rule("fast", None)).endswith(" adaptive")
    assert str(study.read_rule("plain", 8)) == "plain"
    listed = [str(study.read_rule(rule, 5)) for name in study.RULE_LISTS for rule in study.read_rules([name])]
    assert "all(entropy:0.3,margin:1,exact-first:8) agree:2 k=5" in listed


def test_seeds_of_an_item_count_together(tmp_path):
    for seed in (0, 1):
        chunk = tmp_path / str(seed) / "gsm8k-0000-0001"
        chunk.mkdir(parents=True)
        names = {name: name for name in ("plain", "exact", "good")}
        identity = {"part": "gsm8k", "names": names, "parallel": 1, "max_tokens": 4, "seed": seed, "temperature": 0.6}
        (chunk / study.journal.RUN).write_text(json.dumps({"identity": identity}))
        rows = [{**line(0, name, seed == 0), "item": "a", "group": "a"} for name in names]
        (chunk / study.journal.ITEMS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, lines = study.read_study([tmp_path / "0", tmp_path / "1"])
    compared = study.compare(lines, "good")
    assert (compared.result.n, compared.result.n_correct) == (2, 1)
    assert len({row["item"] for row in lines}) == 2 and len({row["group"] for row in lines}) == 1


def test_a_rule_counts_when_it_has_answered_a_whole_chunk(tmp_path):
    """Of several requests at once: the short answers are there first."""
    chunk = tmp_path / "gsm8k-0000-0002"
    chunk.mkdir()
    names = {name: name for name in ("plain", "exact", "good", "begun")}
    identity = {"part": "gsm8k", "names": names, "parallel": 8, "max_tokens": 4, "seed": 0, "items": ["a", "b"]}
    (chunk / study.journal.RUN).write_text(json.dumps({"identity": identity}))
    rows = [{**line(0, name, True), "item": item, "group": item} for name in names for item in "ab"][:-1]
    (chunk / study.journal.ITEMS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, lines = study.read_study([tmp_path])
    assert [row["setting"] for row in lines] == ["plain"] * 2 + ["exact"] * 2 + ["good"] * 2


def line(i, setting, correct, **more):
    counts = {"committed": 4, "rounds": 2, "loose_accepted": 0}
    return {
        "part": "gsm8k", "item": f"gsm8k/{i}", "group": f"gsm8k/{i}", "setting": setting, "correct": correct,
        "detail": {}, "loop": False, "finish": "eog", "drafted_rounds": 1, "margins": {"loose": [], "taken back": []},
        "decode_tokens": 3, "decode_seconds": 1.0, "stats": counts, "output": "a", "tokens": [1], **more,
    }  # fmt: skip


@pytest.fixture
def lines():
    """Forty items, thirty of them right: `bad` harms half of them, `good` none, twice as fast, with a loop more."""
    out = []
    for i in range(40):
        right = i < 30
        out += [line(i, name, right) for name in ("plain", "exact")]
        out.append(line(i, "bad", right and i % 2 == 0, tokens=[2], output="b"))
        out.append(
            line(i, "good", right, loop=i == 3, decode_seconds=0.5, margins={"loose": [0.1, 0.25], "taken back": []})
        )
    return [*out, line(40, "good", True)]  # what exact has not answered counts nowhere


def test_items_with_a_loop_are_left_out_of_a_rule(lines):
    assert [study.compare(lines, "good", without_loops).result.n for without_loops in (False, True)] == [40, 39]
    assert study.compare(lines, "bad", True).result.n == 40


def test_a_rule_is_compared_with_exact_answers_of_its_items(lines):
    good, bad = study.compare(lines, "good"), study.compare(lines, "bad")
    assert study.compare(lines, "other") is None
    assert study.answer_cells(good)[3] == "-0 +0" and study.answer_cells(bad)[3] == "-15 +0"
    assert good.loops.endswith("+1 -0") and good.recovery.estimate == 1 and bad.recovery.estimate == 0.5
    assert study.speed_cells(good)[1].startswith("2.00 ") and study.speed_cells(good)[-1] == "50"
    assert study.looseness_cells(good) == ["2.00", "0.00", "0.175", "", "50"]


def test_few_items_are_off_as_far_as_sampling_theory_says(lines):
    """Half of 30 items that exact decoding has right are lost: a draw of n has a hypergeometric number of them."""
    right = [row for row in lines if int(row["item"].partition("/")[2]) < 30]
    rows = study.dev_set_cells(study.compare(right, "bad"), [4, 8, 16, 30, 64])
    assert [row[0] for row in rows] == ["4", "8", "16"], "those that are fewer than all"
    for n, (_, mean, between, *steps) in zip((4, 8, 16), rows):
        kept = np.arange(n + 1)
        found, off = scipy.stats.hypergeom(30, 15, n), 100 * (kept / n - 0.5)
        assert abs(float(mean) - np.abs(off) @ found.pmf(kept)) < 1.5
        assert between == f"{off[int(found.ppf(0.025))]:+.1f} to {off[int(found.ppf(0.975))]:+.1f}"
        assert steps == ["0.000", "+0.000 to +0.000"]
    assert rows == study.dev_set_cells(study.compare(right, "bad"), [4, 8, 16]), "always the same draws"
    wrong = [{**row, "correct": False} for row in lines]
    assert study.dev_set_cells(study.compare(wrong, "bad"), [4])[0][1:3] == ["", ""]
    longer = [{**row, "stats": {**row["stats"], "rounds": 1 + i % 3}} for i, row in enumerate(lines)]
    assert float(study.dev_set_cells(study.compare(longer, "bad"), [4])[0][3]) > 0


def test_what_surely_loses_is_out_of_the_race(lines):
    assert study.in_the_race(lines, ["bad", "good", "not answered yet"]) == ["good", "not answered yet"]


@pytest.mark.slow
def test_a_run_is_recorded_and_reported(tiny, data, tmp_path):
    (tmp_path / "gsm8k_test.jsonl").write_bytes((data / "gsm8k_sample.jsonl").read_bytes())
    out = tmp_path / "out"
    script = [sys.executable, str(BENCHMARKS / "study.py")]
    options = "--parts gsm8k instructions --limit gsm8k=6 instructions=3 --rules margin:0.5 fast --race 3 --k 4 "
    options += "--max-tokens 40 --threads 1 --ctx 1024 --parallel 2"
    files = {"--model": tiny[0], "--draft": tiny[1], "--data": tmp_path, "--out": out}
    record = [*script, "record", *(str(word) for pair in files.items() for word in pair), *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    subprocess.run(record, check=True, timeout=300, env=environment)
    assert sum(path.read_bytes().count(b"\n") for path in out.glob("*/items.jsonl")) == (6 + 3) * 4
    page = subprocess.run(
        [*script, "report", str(out), "--dev-sets", "2,4"], check=True, capture_output=True, text=True, env=environment
    ).stdout
    assert "| gsm8k | `margin:0.5` | 6 |" in page and "| instructions | `fast` | 3 |" in page
    few = page.partition("## The error of few items")[2]
    assert "| gsm8k | `margin:0.5` | 6 | 4 |" in few and "| instructions | `fast` | 3 | 2 |" in few
    record[record.index("--k") + 1] = "3"
    other = subprocess.run(record, capture_output=True, text=True, env=environment)
    assert other.returncode == 1 and "other" in other.stderr and str(out) in other.stderr
