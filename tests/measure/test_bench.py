"""Prompt sets and measurements."""

from __future__ import annotations

import ctypes
import json
import math
import os
from dataclasses import replace

import pytest

from pyfly_cpp.decoding import EXACT, PLAIN, Decoding
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.machine.conditions import resident_mib
from pyfly_cpp.machine.prompt_sets import BenchPrompt, pick_prompts, read_prompts
from pyfly_cpp.machine.rows import DataError
from pyfly_cpp.measure import plot, report
from pyfly_cpp.measure.generator import Generated, Sampling
from pyfly_cpp.measure.load import summarise_loads
from pyfly_cpp.measure.runner import measure
from pyfly_cpp.measure.speed import Measured, Memory, measure_memory, summarise
from pyfly_cpp.measure.statistics import for_json

SETTINGS = [
    PLAIN,
    EXACT,
    Decoding.parse("margin:0.3 reconverge"),
    Decoding.parse("margin:1 reconverge"),
    Decoding.parse("exact lookup"),
]


@pytest.fixture(scope="module")
def measured(generator):
    return measure(generator, read_prompts()[:6], SETTINGS, 32)


def test_the_built_in_prompts():
    prompts = read_prompts()
    assert len(prompts) == 12 and len({p.category for p in prompts}) == 6 and all(len(p.turns) == 1 for p in prompts)
    assert len({p.category for p in pick_prompts(prompts, 6)}) == 6
    assert pick_prompts(prompts, 99) == prompts


def test_forms_of_one_prompt_are_one_prompt(measured):
    forms = [BenchPrompt(f"{group}{i}", "story", ("Tell.",), group=group) for group in "ab" for i in range(3)]
    assert [p.id for p in pick_prompts([*forms, BenchPrompt("c", "story", ("Tell.",))], 3)] == ["a0", "b0", "c"]
    same = [replace(m, prompt=replace(m.prompt, group="one")) for m in measured]
    assert summarise(same)[1].n_prompts == 1 and math.isnan(summarise(same)[1].tokens_per_second.low)


def test_a_later_turn_that_cannot_fit_is_known_before_anything_is_measured(generator):
    long = BenchPrompt("talk", "", ("Hello.",) * 8)
    with pytest.raises(ValueError, match=r"'talk'.*does not fit"):
        measure(generator, [read_prompts()[0], long], [PLAIN], generator.llm.n_ctx() // 8)


def test_reads_turns_and_categories(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {
            "id": "spec-bench-81",
            "category": "writing",
            "task": "mt_bench",
            "turns": ["One.", "Two."],
            "reference": None,
        },
        {"prompt": "Three."},
        {"id": 7, "prompt": "Four.", "answer": "4", "prompt_id": "story-5"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(path) == [
        BenchPrompt("spec-bench-81", "writing", ("One.", "Two.")),
        BenchPrompt("2", "", ("Three.",)),
        BenchPrompt("7", "", ("Four.",), "story-5"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "line 1: neither 'prompt' nor 'turns'"),
        ({"turns": []}, "'turns' is empty"),
        ({"turns": ["a", " "]}, "an empty text"),
        ({"turns": "a"}, "must be a list of texts"),
        ({"prompt": 3}, "must be a text"),
        ({"prompt": "a", "category": 3}, "'category' must be a text"),
    ],
)
def test_wrong_rows(row, message, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_everything_is_measured_once(measured):
    assert len(measured) == 6 * len(SETTINGS)
    assert len({(m.prompt.id, m.setting) for m in measured}) == len(measured)
    begins = [m.setting for m in measured[:: len(SETTINGS)]]
    assert begins[: len(SETTINGS)] == [str(s) for s in SETTINGS], "who begins changes from prompt to prompt"


@pytest.mark.alike
def test_sampling(generator):
    """Every prompt of every pass has a seed of its own, the same for all settings and in a second measurement."""
    few, settings = [read_prompts()[0]] * 2, [PLAIN, Decoding.parse("stochastic")]

    def outputs(sampling):
        found = {}
        for m in measure(generator, few, settings, 16, repeats=2, sampling=sampling):
            found.setdefault(m.setting, []).append(m.result.tokens)
        return found

    greedy, drawn = outputs(Sampling()), outputs(Sampling(1.5, 7))
    assert len(set(greedy["plain"])) == 1 and greedy["stochastic"] == greedy["plain"]
    assert len(set(drawn["plain"])) == len(set(drawn["stochastic"])) == 4
    assert outputs(Sampling(1.5, 7)) == drawn
    assert outputs(Sampling(1.5, 8))["plain"][:3] == drawn["plain"][1:]
    assert Sampling().described(4) == "greedy" and Sampling(0.7, 3).described(4) == "temperature 0.7, seeds 3 to 6"


@pytest.mark.alike
def test_summaries_are_totals(measured):
    plain, exact, *_, lookup = summarise(measured)
    mine = [m.result for m in measured if m.setting == "exact"]
    tokens, seconds = sum(r.decode_tokens for r in mine), sum(r.decode_seconds for r in mine)
    assert exact.tokens_per_second.estimate == pytest.approx(tokens / seconds)
    assert exact.speedup_plain.estimate == pytest.approx(
        exact.tokens_per_second.estimate / plain.tokens_per_second.estimate
    )
    assert plain.mean_accepted == 1 and plain.speedup_plain is None and plain.same_output is None
    assert exact.speedup_exact is None and exact.same_output == 1 and exact.loose_rate == 0
    assert exact.mean_accepted > 1 and len(exact.acceptance_at_depth) == 8 and lookup.acceptance < 1
    for s in (plain, exact, lookup):
        assert sum(s.split.values()) == pytest.approx(1, abs=0.02) and s.n_prompts == 6
    assert json.dumps(for_json(summarise(measured)), allow_nan=False)


def test_memory(generator):
    if resident_mib() is None:
        pytest.skip("this system does not tell")
    generator.llm.drafter = None
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # what was freed before would serve the draft
    sizes = measure_memory(generator, read_prompts()[0], [EXACT, PLAIN, Decoding.parse("exact lookup")])
    assert list(sizes) == ["exact", "plain", "exact lookup"]
    assert 1 < sizes["exact"].growth < 200, "the draft's 2.4 MB of weights, its cache and its buffers"
    assert all(size.resident > size.growth for size in sizes.values())
    assert sizes["plain"].growth < sizes["exact"].growth


def test_texts(measured):
    page = report.page("Speed", ["a fact"], report.tables(measured, {"exact": Memory(120.4, 20.4)}), report.NOTE)
    assert "| 120 (+20) |" in page
    assert "- a fact" in page and "margin:0.3" in page and "x plain" in page
    assert report.categories(measured) == ["code", "edit", "maths"]
    assert len(summarise(measured, "code")) == len(SETTINGS)


def test_the_plot_is_a_picture(measured):
    pytest.importorskip("matplotlib")
    assert plot.plot(measured, "Speed").startswith(b"\x89PNG")


def test_turns_share_one_history(generator):
    prompt = BenchPrompt("a", "", ("How many apples?", "And how many pears?"))
    rows = measure(generator, [prompt], [EXACT, Decoding.parse("entropy:0.1 reconverge")], 16)
    assert [row.turn for row in rows] == [0, 0, 1, 1]
    assert rows[2].n_prompt == rows[3].n_prompt > rows[0].n_prompt


@pytest.mark.alike
def test_several_at_once(generators):
    """Every prompt counts once for each setting and number, however many run again to keep the batch full."""
    _, parallel = generators
    prompts, settings = read_prompts()[:6], [PLAIN, EXACT, Decoding.parse("exact lookup")]
    rows = measure(parallel, prompts, settings, 24, counts=(1, 3))
    assert len(rows) == 6 * 3 * 2 == len({(m.prompt.id, m.setting, m.n_parallel) for m in rows})
    for m in rows:
        assert len({other.result.tokens for other in rows if other.prompt.id == m.prompt.id}) == 1
        assert m.result.stats.prefilled > 0.5 * m.n_prompt, "no text is served by an earlier one"
        assert len(m.result.arrivals) == m.result.stats.rounds and list(m.result.arrivals) == sorted(m.result.arrivals)
    loads = summarise_loads(rows)
    assert [(load.summary.setting, load.n_parallel) for load in loads] == [
        (str(setting), n) for setting in settings for n in (1, 3)
    ]
    for load in loads:
        assert load.summary.tokens_per_second.estimate > 0 and load.prompt_tokens_per_second > 0
        assert 0 < load.first_token[0] <= load.first_token[1] and 0 < load.between_tokens[0] <= load.between_tokens[1]
        assert (load.times_fewest is None) == (load.n_parallel == 1)
    mine = [m.result for m in rows if m.setting == "plain" and m.n_parallel == 3]
    total = sum(r.decode_tokens for r in mine) / sum(r.decode_seconds for r in mine)
    assert loads[1].summary.tokens_per_second.estimate == pytest.approx(total)
    assert loads[1].times_fewest.estimate == pytest.approx(total / loads[0].summary.tokens_per_second.estimate)
    assert json.dumps(for_json(loads), allow_nan=False)
    assert len(report.throughput_cells(loads)[1]) == len(report.latency_cells(loads)[1]) == 6


@pytest.mark.parametrize(
    ("times", "words"), [(2.0, "faster here"), (0.5, "slower here"), (1.0, "no certain difference")]
)
def test_the_verdict(measured, times, words):
    def timed(m, seconds):
        result = replace(m.result, decode_tokens=100, decode_seconds=seconds)
        return [replace(m, prompt=replace(m.prompt, id=f"{i}"), result=result) for i in range(6)]

    plain, exact = (next(m for m in measured if m.setting == name) for name in ("plain", "exact"))
    spread = [0.9, 1.1] * 3 if times == 1 else [1.0] * 6
    governed = [
        replace(m, setting="exact adaptive", result=replace(m.result, decode_seconds=s / times))
        for m, s in zip(timed(exact, 1.0), spread)
    ]
    rows = [*timed(plain, 1.0), *governed, *timed(exact, 0.8)]
    sentence = report.verdict(summarise(rows), "exact adaptive")
    assert words in sentence and ("lossless setting `exact, fixed length` is" in sentence) == (times < 1.25)
    assert report.verdict(summarise([*governed, *timed(exact, 0.8)]), "exact adaptive") == "", "compared with nothing"
    few = [m for m in rows if m.prompt.id in "0123"]
    assert "too few" in report.verdict(summarise(few), "exact adaptive")
    names = [row[0] for row in report.speed_cells(summarise(rows), "exact adaptive")[1]]
    assert names == ["plain", "exact adaptive (as in chat)", "exact, fixed length"]


def test_answers_that_end_in_their_first_step_have_no_speed():
    def ended(i, setting):
        stats = Stats(rounds=1, committed=1, beginnings=1, committed_first=1, prefilled=5)
        result = Generated("", (), "eog", 0.1, 0, 0.0, stats, arrivals=(0.1,))
        return Measured(BenchPrompt(f"{i}", "", ("x",)), 0, 0, setting, 5, result)

    rows = [ended(i, setting) for i in range(8) for setting in ("plain", "exact adaptive", "exact")]
    loads = summarise_loads(rows)
    assert report.verdict(summarise(rows), "exact adaptive") == ""
    empty = replace(loads[0], summary=replace(loads[0].summary, mean_accepted=math.nan))
    for _, body in (
        report.speed_cells([empty.summary]),
        report.latency_cells(loads),
        report.throughput_cells([replace(empty, prompt_tokens_per_second=math.nan)]),
    ):
        assert "–" in body[0] and "nan" not in str(body)


def test_a_curve_is_of_settings_that_differ_in_their_threshold_alone():
    settings = ["relaxed:5:0.6", "relaxed:10:0.6", "relaxed:10:0.3", "margin:0.3", "margin:1", "margin:1 agree:6",
                "margin:0.3 agree:6", "entropy:0.3:2", "exact", "all(margin:0.3,exact-first:1)"]  # fmt: skip
    assert plot._by_threshold(settings) == {
        "relaxed:10": [(0.6, "relaxed:10:0.6"), (0.3, "relaxed:10:0.3")],
        "margin": [(0.3, "margin:0.3"), (1.0, "margin:1")],
        "margin agree:6": [(1.0, "margin:1 agree:6"), (0.3, "margin:0.3 agree:6")],
    }


def test_prompts_of_plain_text(tmp_path):
    (tmp_path / "mine.txt").write_text("Hello there\n\n  What is 2 + 2?\n", encoding="utf-8")
    assert [prompt.turns for prompt in read_prompts(tmp_path / "mine.txt")] == [("Hello there",), ("What is 2 + 2?",)]
    (tmp_path / "mine.txt").write_text("\ufeffone\u2028prompt\fof one line\r\nanother\n", encoding="utf-8")
    found = [(prompt.id, *prompt.turns) for prompt in read_prompts(tmp_path / "mine.txt")]
    assert found == [("1", "one\u2028prompt\fof one line"), ("2", "another")]
    for content, wrong in ((b"\n \n", "mine.txt has no prompts"), (b"caf\xe9", "mine.txt' is not UTF-8 at byte 3")):
        (tmp_path / "mine.txt").write_bytes(content)
        with pytest.raises(DataError, match=wrong):
            read_prompts(tmp_path / "mine.txt")
    with pytest.raises(DataError, match=r"none\.txt' cannot be read"):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_prompts_of_a_pipe_are_refused(tmp_path):
    """They could be read once, and their hash is to be of what was read."""
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(DataError, match="a device or a pipe"):
        read_prompts(tmp_path / "p.jsonl")
