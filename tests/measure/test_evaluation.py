"""Runs: the table is the same however often they are killed, and runs never mix."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from pyfly_cpp.cli.measuring import Session
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding
from pyfly_cpp.machine.conditions import CONDITIONS
from pyfly_cpp.machine.files import OutputError
from pyfly_cpp.machine.kernels import KernelVerdict
from pyfly_cpp.machine.rows import DataError, read_lines_so_far
from pyfly_cpp.measure import evaluation, journal, report
from pyfly_cpp.measure.generator import Sampling
from pyfly_cpp.measure.quality import summarise
from pyfly_cpp.measure.tasks.gsm8k import Gsm8k
from pyfly_cpp.measure.tasks.humaneval import HumanEval
from pyfly_cpp.measure.tasks.registry import get_task
from pyfly_cpp.measure.tasks.sandbox import SandboxError

SETTINGS = (PLAIN, EXACT, Decoding.parse("margin:0.5 reconverge"))


def plan(data, n=3, max_tokens=24, **changes):
    items = get_task("gsm8k").read(data / "gsm8k_sample.jsonl")[:n]
    arguments = {"task": get_task("gsm8k"), "items": items, "settings": SETTINGS, "max_tokens": max_tokens, **changes}
    return evaluation.Plan(**arguments)


def without_time(line):
    kept = {k: v for k, v in line.items() if "seconds" not in k}
    # Loaded drafters and remembered answers depend on what ran before.
    before = ("accepted_by_drafter", "accepted_from_answers", "time_to_first_token")
    kept["stats"] = {k: v for k, v in line["stats"].items() if "second" not in k and k not in before}
    return kept


def table_without_time(lines):
    table = summarise(lines, [str(s) for s in SETTINGS], 12).as_dict()
    for row in table["rows"]:
        for name in ("tokens_per_second", "speedup_plain", "speedup_exact"):
            del row[name]
    return table


def test_a_full_disk_names_the_file_and_is_resumed(tmp_path):
    resource = pytest.importorskip("resource")
    lines = journal.Lines(tmp_path / "items.jsonl")
    lines.append({"n": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match=r"items\.jsonl .*same command"):
            lines.append({"long": "x" * 200})
        with pytest.raises(OSError):  # a benchmark can be measured without it
            journal.Journal(tmp_path / "b.part", {"long": "x" * 200}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = journal.Lines(tmp_path / "items.jsonl")
    assert again.rows == [{"n": 1}] and again.append({"n": 2}) == {"n": 2}


def test_a_run(data, generator, tmp_path):
    seen = []
    lines = evaluation.run(
        plan(data), generator, tmp_path / "run", progress=lambda done, n, line: seen.append((done, n))
    )
    assert [(line["item"], line["setting"]) for line in lines] == [
        (item.id, str(setting)) for item in plan(data).items for setting in SETTINGS
    ]
    assert seen == [(i, 9) for i in range(1, 10)]
    for plain, exact in zip(lines[::3], lines[1::3]):
        assert plain["output"] == exact["output"], "exact is the target's own text"
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["items.jsonl", "run.json"]
    again = evaluation.run(plan(data), generator, tmp_path / "run")
    assert again == lines, "a finished run is read, not repeated"


def test_a_traced_run_keeps_margins_and_counts_steps_that_drafted(data, generator, tmp_path, monkeypatch):
    monkeypatch.setattr(generator.llm, "trace", True)
    loose = [*SETTINGS[:2], Decoding.parse("margin:0.5")]
    lines = evaluation.run(plan(data, n=6, settings=loose), generator, tmp_path)
    for plain, _, line in zip(lines[::3], lines[1::3], lines[2::3]):
        assert plain["drafted_rounds"] == 0 < line["drafted_rounds"] <= line["stats"]["rounds"]
        margins = line["margins"]
        assert len(margins["loose"]) == line["stats"]["loose_accepted"] and all(0 <= m < 0.5 for m in margins["loose"])
        assert all(0 <= margin < 0.5 for margin in margins["taken back"])
    assert any(line["margins"]["loose"] for line in lines)


def test_turns_change_from_item_to_item(data, generator, tmp_path):
    evaluation.run(plan(data), generator, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert [row["setting"] for row in rows[::3]] == [str(s) for s in SETTINGS]


@pytest.mark.parametrize("cut", [1, -1, -40])
def test_a_torn_last_line_is_written_again(data, generator, tmp_path, cut):
    lines = evaluation.run(plan(data), generator, tmp_path)
    path = tmp_path / "items.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[: last + cut] if cut > 0 else whole[:cut])
    again = evaluation.run(plan(data), generator, tmp_path)
    assert [without_time(line) for line in again] == [without_time(line) for line in lines]
    assert path.read_bytes().count(b"\n") == 9


def test_a_middle_line_that_is_broken_is_refused(data, generator, tmp_path):
    evaluation.run(plan(data), generator, tmp_path)
    path = tmp_path / "items.jsonl"
    rows = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([rows[0], b"{broken", *rows[2:]]))
    with pytest.raises(DataError, match="line 2: not JSON"):
        evaluation.run(plan(data), generator, tmp_path)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_tokens": 25}, "max_tokens"),
        ({"settings": SETTINGS[:2]}, "settings"),
        ({"sampling": Sampling(seed=1)}, "seed"),
        ({"conditions": (("model", "another"),)}, "model"),
        ({"n": 2}, "items"),
    ],
)
def test_runs_do_not_mix(data, generator, tmp_path, changes, name):
    lines = evaluation.run(plan(data), generator, tmp_path)
    before = (tmp_path / "items.jsonl").read_bytes()
    with pytest.raises(OutputError, match=rf"other {name}.*--force"):
        evaluation.run(plan(data, **changes), generator, tmp_path)
    assert (tmp_path / "items.jsonl").read_bytes() == before
    assert len(evaluation.run(plan(data, **changes), generator, tmp_path, force=True)) <= len(lines)


def test_strange_folders_are_left_alone(data, generator, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds thesis\.txt"):
        evaluation.run(plan(data), generator, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be written to"):
        evaluation.run(plan(data), generator, tmp_path / "file")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
def test_files_of_the_same_name_are_left_alone(data, generator, tmp_path, force):
    (tmp_path / "items.jsonl").write_text("mine")
    with pytest.raises(OutputError, match=r"holds items\.jsonl"):
        evaluation.run(plan(data), generator, tmp_path, force=force)
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(OutputError, match="was not written by this program"):
        evaluation.run(plan(data), generator, tmp_path, force=force)
    assert (tmp_path / "items.jsonl").read_text() == "mine" and (tmp_path / "run.json").read_text() == '{"mine": 1}'


def test_force_starts_over_beside_other_files(data, generator, tmp_path):
    lines = evaluation.run(plan(data), generator, tmp_path)
    (tmp_path / "log.txt").write_text("mine")
    again = evaluation.run(plan(data), generator, tmp_path, force=True)
    assert [without_time(line) for line in again] == [without_time(line) for line in lines]
    assert (tmp_path / "log.txt").read_text() == "mine"
    assert len((tmp_path / "items.jsonl").read_text().splitlines()) == len(lines)


def test_all_settings_start_from_the_same_cache(data, generator, tmp_path):
    lines = evaluation.run(plan(data), generator, tmp_path)
    prefilled = {line["stats"]["prefilled"] for line in lines}
    assert len(prefilled) == 1, "whoever begins an item evaluates no more of its prompt than the others"


def test_two_writers(data, generator, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process"):
            evaluation.run(plan(data), generator, tmp_path)


def test_code_needs_permission(data, generator, tmp_path, containment):
    task = HumanEval(containment=containment)
    items = task.read(data / "humaneval_sample.jsonl")[:1]
    wanted = plan(data, task=task)
    with pytest.raises(evaluation.CodeExecutionError, match="--allow-code-execution"):
        evaluation.run(wanted, generator, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    allowed = evaluation.Plan(task, items, (EXACT,), max_tokens=16, allow_code_execution=True)
    (line,) = evaluation.run(allowed, generator, tmp_path / "a")
    assert line["correct"] is False and line["detail"]["status"] in ("failed", "timeout", "exited")


class Breaks(Gsm8k):
    """Cannot judge the outputs of some items."""

    def __init__(self, error, bad):
        self.error, self.bad, self.n_scored = error, bad, 0

    def score(self, item, text, tokens):
        self.n_scored += 1
        if item.id in self.bad:
            raise self.error
        return super().score(item, text, tokens)


@pytest.mark.parametrize(
    "error",
    [RecursionError("too deep"), TypeError("'int' object is not iterable"), ValueError("\udcff \0"), MemoryError()],
)
def test_an_output_that_cannot_be_judged_is_wrong_and_met_once(data, generator, tmp_path, error):
    whole = plan(data)
    task = Breaks(error, bad={whole.items[0].id})
    lines = evaluation.run(plan(data, task=task), generator, tmp_path)
    assert len(lines) == task.n_scored == 9
    for line in lines[:3]:
        assert line["correct"] is False and type(error).__name__ in line["detail"]["unjudged"] and line["output"]
    assert all("unjudged" not in line["detail"] for line in lines[3:])
    assert evaluation.run(plan(data, task=task), generator, tmp_path) == lines and task.n_scored == 9
    table = summarise(lines, [str(s) for s in SETTINGS], 3)
    assert any("3 outputs could not be judged" in note for note in report.task_notes(table))
    assert "strict" in table.rows[0].also, "what the other items have beside it is still told"


def test_a_sandbox_that_stops_working_ends_the_run_without_a_verdict(data, generator, tmp_path):
    task = Breaks(SandboxError("the sandbox cannot be set up"), bad={plan(data).items[1].id})
    with pytest.raises(SandboxError):
        evaluation.run(plan(data, task=task), generator, tmp_path)
    task.bad = set()
    lines = evaluation.run(plan(data, task=task), generator, tmp_path)
    assert len(lines) == 9 and not any("unjudged" in line["detail"] for line in lines)


def test_too_long_prompts_are_told_before_the_first_is_run(data, generator, tmp_path):
    with pytest.raises(ValueError, match=r"item 'gsm8k-test-0'.*raise --n-ctx"):
        evaluation.run(plan(data, max_tokens=1000), generator, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def verdicts(lines):
    kept = ("item", "setting", "correct", "extracted", "finish", "output", "tokens", "prompt")
    return [{name: line[name] for name in kept} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_several_at_once_give_the_verdicts_of_one_after_the_other(data, generators, tmp_path, temperature):
    alone, parallel = generators
    settings = (*SETTINGS, Decoding.parse("exact lookup k=3"))
    wanted = plan(data, n=8, settings=settings, sampling=Sampling(temperature))
    lines = evaluation.run(wanted, alone, tmp_path / "alone")
    assert verdicts(evaluation.run(wanted, parallel, tmp_path / "parallel")) == verdicts(lines)


@pytest.mark.slow
def test_several_at_once_stopped_and_resumed(data, generators, tmp_path):
    """Stopped wherever a line is written; the other items of the block are neither lost nor made twice."""
    _, parallel = generators
    wanted = plan(data, n=4)
    calm = evaluation.run(wanted, parallel, tmp_path / "calm")

    def stop(done, n_total, line):
        raise KeyboardInterrupt

    for n in range(1, 12):
        with pytest.raises(KeyboardInterrupt):
            evaluation.run(wanted, parallel, tmp_path / "stopped", progress=stop)
        assert len(read_lines_so_far(tmp_path / "stopped" / "items.jsonl")[0]) == n
    lines = evaluation.run(wanted, parallel, tmp_path / "stopped")
    assert verdicts(lines) == verdicts(calm) and len(lines) == 12


def test_the_seconds_of_several_at_once_are_shares_of_the_time_it_took(data, generators, tmp_path):
    _, parallel = generators
    begun = time.perf_counter()
    lines = evaluation.run(plan(data, n=6, settings=(PLAIN,), max_tokens=60), parallel, tmp_path)
    took = time.perf_counter() - begun
    decoding, prompts = (sum(line[name] for line in lines) for name in ("decode_seconds", "seconds_prompt"))
    assert all(line["decode_seconds"] > 0 for line in lines)
    # Not shared, they would add up to nearly three times as much. Where in a step a prompt was is not known exactly.
    assert 0.1 * took < decoding + prompts < 1.2 * took


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_evaluation import plan
from pyfly_cpp import DraftModel, FlyLlama
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.measure import evaluation
from pyfly_cpp.measure.generator import Generator
llm = FlyLlama(sys.argv[2], n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
generator = Generator(llm, Resolved((DraftModel(sys.argv[3]),)))
evaluation.run(plan(Path(sys.argv[5]), n=12, max_tokens=160), generator, sys.argv[4])
"""


@pytest.mark.slow
def test_killed_at_any_moment(data, tiny, tmp_path):
    """SIGKILL again and again; the lines and the table are those of a run that nobody disturbed."""

    def start(folder):
        here = os.path.dirname(__file__)
        command = [sys.executable, "-c", CHILD, here, str(tiny[0]), str(tiny[1]), str(folder), str(data)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    calm = start(tmp_path / "calm")
    assert calm.wait(300) == 0, calm.stderr.read().decode()
    rng = random.Random(os.getpid())
    counts = []
    for attempt in range(60):
        process = start(tmp_path / "killed")
        path = tmp_path / "killed" / "items.jsonl"
        before = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + 120
        # Let it get to work, then strike somewhere within the next few generations; give up striking at last.
        while attempt < 50 and process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.stat().st_size > before:
                time.sleep(rng.uniform(0, 0.25))
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        if process.wait(300) == 0:
            break
        assert process.returncode == -signal.SIGKILL, process.stderr.read().decode()
        counts.append(len(read_lines_so_far(path)[0]))
    assert len(counts) >= 3, f"killed only {len(counts)} times"
    calm_lines, killed_lines = (read_lines_so_far(tmp_path / name / "items.jsonl")[0] for name in ("calm", "killed"))
    key = lambda line: (line["item"], line["setting"])  # noqa: E731
    calm_lines, killed_lines = sorted(calm_lines, key=key), sorted(killed_lines, key=key)
    assert [without_time(line) for line in killed_lines] == [without_time(line) for line in calm_lines]
    assert table_without_time(killed_lines) == table_without_time(calm_lines)
    starts = [one["lines_before"] for one in journal.starts(tmp_path / "killed")]
    assert starts == sorted({0, *counts} - {len(killed_lines)})  # those that made lines


def test_the_kernels_of_an_option_go_before_those_of_the_environment():
    machine = {**dict.fromkeys(CONDITIONS, "x"), "kernels": "auto"}
    for models, expected in (({}, "auto"), ({"kernels": "stock"}, "stock")):
        generator = SimpleNamespace(llm=SimpleNamespace(kernels_used=KernelVerdict((), False, "")))
        assert Session(generator, machine, models, "").conditions()["kernels"] == expected
