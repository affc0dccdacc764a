"""eval, bench and explain from the command line: what they write, and one sentence for everything that is
wrong."""

from __future__ import annotations

import contextlib
import json
import os

import llama_cpp
import pytest

pytest.importorskip("click")

from click_runner import click_runner

from pyfly_cpp.cli import cli, loading
from pyfly_cpp.decoding.presets import load_preset
from pyfly_cpp.machine import memory
from pyfly_cpp.machine.files import OutputError
from pyfly_cpp.machine.memory import choose_parallel
from pyfly_cpp.machine.prompt_sets import BenchPrompt
from pyfly_cpp.machine.rows import DataError
from pyfly_cpp.measure.journal import Journal
from pyfly_cpp.measure.tasks import sandbox


@pytest.fixture
def run(model_arguments, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(command, *arguments, models=True):
        return click_runner().invoke(cli, [command, *map(str, arguments), *(model_arguments if models else [])])

    return run


bench, evaluate, explain = "bench", "eval", "explain"


def refused(result, *words):
    """It failed with one line on stderr that has all the words, and no traceback."""
    assert result.exit_code in (1, 2), result.output
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("Error: ") and all(word in error for word in words), result.stderr
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    return error


def test_eval(run, data, tmp_path):
    arguments = [
        "gsm8k",
        "--data",
        data / "gsm8k_sample.jsonl",
        "--limit",
        4,
        "--max-tokens",
        24,
        "-o",
        tmp_path / "run",
    ]
    result = run(evaluate, *arguments, "-s", "margin:0.5 agree:0")
    assert result.exit_code == 0, result.output
    assert "margin:0.5" in result.stdout and "0/4" in result.stdout and "table.md" in result.stderr
    assert max(len(line) for line in result.stdout.splitlines() if line[:1] in "┏┃┡│└") <= 100
    table = json.loads((tmp_path / "run" / "table.json").read_text())
    assert [row["setting"] for row in table["table"]["rows"]] == ["plain", "exact", "margin:0.5"]
    assert table["table"]["n_complete"] == 4 and table["run"]["model"]["sha256"] and table["run"]["data_sha256"]
    page = (tmp_path / "run" / "table.md").read_text()
    assert "sha256" in page and "| exact |" in page
    again = run(evaluate, *arguments, "-s", "margin:0.5", "--json")
    assert json.loads(again.stdout) == table, "nothing is run again, so even the speeds are the same"
    refused(run(evaluate, *arguments), "other settings", "--force")
    assert run(evaluate, *arguments, "--force", "--without-plain").exit_code == 0


def test_eval_of_several_at_once(run, data, tmp_path):
    arguments = ["gsm8k", "--data", data / "gsm8k_sample.jsonl", "--limit", 5, "--max-tokens", 16]
    arguments += ["-s", "margin:0.5", "-s", "exact lookup", "-o", tmp_path / "run"]
    result = run(evaluate, *arguments, "--parallel", 3)
    assert result.exit_code == 0, result.output
    assert "3 requests at a time" in result.stdout
    record = json.loads((tmp_path / "run" / "table.json").read_text())
    assert record["run"]["parallel"] == 3 and record["table"]["n_complete"] == 5
    assert "3 requests at a time" in (tmp_path / "run" / "table.md").read_text()
    again = run(evaluate, *arguments, "--parallel", 3, "--json")
    assert json.loads(again.stdout) == record, "nothing is run again"
    refused(run(evaluate, *arguments), "other parallel (3, now null)", "--force")
    refused(run(evaluate, *arguments, "--parallel", 2), "other parallel (3, now 2)", "--force")


def test_eval_chooses_how_many_at_once(run, data, tmp_path, monkeypatch):
    arguments = ["gsm8k", "--data", data / "gsm8k_sample.jsonl", "--limit", 1, "--max-tokens", 4, "--parallel", "auto"]
    assert run(evaluate, *arguments, "-o", tmp_path / "much").exit_code == 0
    assert json.loads((tmp_path / "much" / "run.json").read_text())["identity"]["parallel"] == 8
    sample = data / "gsm8k_sample.jsonl"
    refused(run(evaluate, *arguments, "-o", tmp_path / "no", "-m", sample, models=False), "is not a GGUF file")
    monkeypatch.setattr(memory, "available", lambda: 2**25)  # one context
    assert run(evaluate, *arguments, "-o", tmp_path / "little").exit_code == 0
    assert "parallel" not in json.loads((tmp_path / "little" / "run.json").read_text())["identity"]


def test_automatic_requests_leave_room_for_the_weights(tiny_target, monkeypatch):
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    monkeypatch.setattr(memory, "simulated_context", lambda path, model, context, n, n_ctx: n * 10**8)
    weights = memory.bytes_of_model(tiny_target)
    for n_free, n in ((weights, 1), (weights + 12 * 10**8, 3), (10**11, 8), (0, 1)):
        monkeypatch.setattr(memory, "available", lambda n_free=n_free: n_free)
        assert choose_parallel(tiny_target, 1024) == n


@pytest.mark.parametrize("command", [evaluate, bench])
def test_impossible_numbers_of_requests(run, data, tmp_path, command, monkeypatch):
    arguments = ["--limit", 1]
    if command is evaluate:
        arguments += ["gsm8k", "--data", data / "gsm8k_sample.jsonl", "-o", tmp_path / "run"]
    else:
        prompts = tmp_path / "p.jsonl"
        prompts.write_text('{"prompt": "One."}\n' * 1000)
        arguments = ["--prompts", prompts]
    for wrong in (0, -1, "x", 2.5, ""):
        refused(run(command, *arguments, "--parallel", wrong), "is not a number of requests")
    refused(run(command, *arguments, "--parallel", 1000), "--parallel must be an integer in 1..256")
    monkeypatch.setattr(memory, "available", lambda: 2**20)
    refused(run(command, *arguments, "--parallel", 64), "64 requests of 1024 tokens", "lower --parallel")
    assert not (tmp_path / "run").exists()


def test_eval_with_worked_examples(run, data, tmp_path, containment):
    sample = data / "mbpp_sample.jsonl"
    arguments = ["mbpp", "--data", sample, "--examples", sample, "--limit", 1, "--max-tokens", 8]
    arguments += ["--few-shot", 2, "--allow-code-execution", "--without-plain", "-o", tmp_path / "run"]
    arguments += ["--containment", containment]
    result = run(evaluate, *arguments)
    assert result.exit_code == 0, result.output
    assert "2 items are worked examples and not evaluated" in result.stderr
    said = "Nothing contains" if containment == "none" else f"is contained by: {containment}"
    assert said in result.stderr
    (line,) = map(json.loads, (tmp_path / "run" / "items.jsonl").read_text().splitlines())
    assert line["item"] == "mbpp-4" and line["prompt"].count("You are an expert") == 3


def test_published_files_number_their_rows_apart(run, tmp_path):
    for name, topics in (("test", "abc"), ("train", "xbz")):
        rows = [{"question": f"What is {topic}?", "answer": "It is.\n#### 4"} for topic in topics]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--data", tmp_path / "test.jsonl", "--examples", tmp_path / "train.jsonl", "--few-shot", 2]
    result = run(evaluate, "gsm8k", *arguments, "--max-tokens", 4, "-o", tmp_path / "run")
    assert result.exit_code == 0 and "1 item is a worked example and not evaluated" in result.stderr, result.output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["identity"]["items"] == ["gsm8k-0", "gsm8k-2"]


def test_eval_resumes_with_as_many_requests_and_names_every_start(run, data, tmp_path, monkeypatch):
    arguments = [evaluate, "gsm8k", "--data", data / "gsm8k_sample.jsonl", "--limit", 2, "--max-tokens", 4]
    arguments += ["--parallel", "auto", "-o", tmp_path / "run"]
    monkeypatch.setattr("pyfly_cpp.machine.conditions.threads_sleep", lambda: False)
    for n, busy in ((2, 1.5), (3, 0.0), (3, 1.5)):
        monkeypatch.setattr(loading.Models, "choose_parallel", lambda _, n=n: n)
        monkeypatch.setattr("pyfly_cpp.machine.conditions.used_by_others", lambda busy=busy: busy)
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        table = (tmp_path / "run" / "table.md").read_text()
        assert "2 requests at a time" in table and "NOT RELIABLE: other programs" in table
        assert (", resumed " in table) == (n == 3)
        lines = (tmp_path / "run" / "items.jsonl").read_text().splitlines(keepends=True)
        starts = json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]
        assert [one["lines_before"] for one in starts] == ([0] if n == 2 else [0, 3])
        if n == 2:
            (tmp_path / "run" / "items.jsonl").write_text("".join(lines[:3]))


def test_eval_without_containment(run, data, tmp_path, monkeypatch):
    """Refused with one sentence before anything is done; asked for, it works and says what it means."""
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox.require_containment.cache_clear()
    arguments = ["humaneval", "--data", data / "humaneval_sample.jsonl", "--limit", 1, "--max-tokens", 4]
    arguments += ["--allow-code-execution", "--without-plain", "-o", tmp_path / "run"]
    try:
        refused(run(evaluate, *arguments), "cannot be contained here", "install bubblewrap", "--containment none")
        assert not (tmp_path / "run").exists()
        result = run(evaluate, *arguments, "--containment", "none")
        assert result.exit_code == 0 and "Nothing contains the model's code" in result.stderr
    finally:
        sandbox.require_containment.cache_clear()


def test_eval_generates_needles(run, tmp_path):
    arguments = [
        "needle",
        "--limit",
        2,
        "--needle-words",
        200,
        "--max-tokens",
        8,
        "-o",
        tmp_path / "run",
        "--without-plain",
    ]
    assert run(evaluate, *arguments).exit_code == 0


def test_eval_refusals(run, data, tmp_path, monkeypatch):
    """Those of this command; what is wrong in a file of data: test_tasks.py, in a setting: test_decoding.py."""
    sample = data / "gsm8k_sample.jsonl"
    torn = tmp_path / "torn.jsonl"
    torn.write_text(sample.read_text() + "{")
    stories = tmp_path / "stories.jsonl"
    stories.write_text('{"id": "1", "prompt": "Write."}\n')
    output = ["-o", tmp_path / "run"]
    refused(run(evaluate, "gms8k", "--data", sample, *output), "Did you mean 'gsm8k'")
    refused(run(evaluate, "writing", *output), "--data")
    refused(run(evaluate, "gsm8k", "--data", torn, *output), "torn.jsonl, line 13")
    refused(run(evaluate, "gsm8k", "--data", sample, "-s", "margn:0.3", *output), "margn")
    refused(run(evaluate, "gsm8k", "--data", sample, "-s", "margin:0.3 adaptive", *output), "adaptive")
    refused(run(evaluate, "humaneval", "--data", data / "humaneval_sample.jsonl", *output), "--allow-code-execution")
    refused(run(evaluate, "writing", "--data", stories, "--few-shot", 3, *output), "--examples")
    refused(run(evaluate, "writing", "--data", stories, "--examples", stories, *output), "worked examples")
    two = tmp_path / "two.jsonl"
    two.write_text("".join(sample.read_text(encoding="utf-8").splitlines(keepends=True)[:2]), encoding="utf-8")
    few = ["--data", sample, "--examples", two, "--few-shot", 3]
    refused(run(evaluate, "gsm8k", *few, *output), "--few-shot 2")
    (tmp_path / "file").write_text("")
    refused(run(evaluate, "gsm8k", "--data", sample, "--limit", 1, "-o", tmp_path / "file"), "cannot be written to")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "embedded_model", lambda: None)
        refused(run(evaluate, "gsm8k", "--data", sample, *output, models=False), "--model")
    assert not (tmp_path / "run").exists()


def test_bench(run, tmp_path):
    files = ["-o", tmp_path / "b.json", "--markdown", tmp_path / "b.md"]
    result = run(bench, "-s", "margin:0.5", "--limit", 6, "--max-tokens", 16, *files)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "b.json").read_text())
    assert (
        len(record["measured"]) == 24
        and record["verdict"] in result.stdout
        and record["machine"]["cpu"]
        and record["models"]["draft_files"][0]["sha256"]
    )
    assert isinstance(record["machine"]["extra_buffers"], bool)
    rounds = record["measured"][1]["rounds"]
    assert set(rounds) == {"committed", "drafted", "matched", "loose_accepted", "seconds"}
    assert len(rounds["drafted"]) == record["measured"][1]["stats"]["rounds"] > 0
    assert set(record["memory_mib"]) == {"plain", "exact adaptive", "exact", "margin:0.5"}
    assert {"plain", "exact adaptive", "exact", "margin:0.5"} == {s["setting"] for s in record["summaries"]}
    assert "total tokens over total seconds" in result.stdout and "# Speed" in (tmp_path / "b.md").read_text()
    assert result.stdout.count("┏") == 1 and "exact, fixed length" in result.stdout
    assert (tmp_path / "b.md").read_text().count("\n| --- ") > 1, "a file has all tables"
    assert "tokens, greedy" in result.stdout
    refused(run(bench, "--limit", 1, *files), "b.json exists already", "--force")
    refused(run(bench, "-o", tmp_path / "b.json" / "x.json"), "cannot be written to")
    refused(run(bench, "-o", tmp_path), "is a folder")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    refused(run(bench, "--prompts", tmp_path / "p.jsonl"), "p.jsonl, line 2", "'prompt' nor 'turns'")
    refused(run(bench, "-s", "entrpy:0.3"), "Did you mean 'entropy'")


def test_bench_overwrites_nothing_that_it_reads_or_writes(run, tiny, tmp_path):
    files = {name: tmp_path / name for name in ("target.gguf", "p.jsonl", "link.json")}
    files["target.gguf"].write_bytes(tiny[0].read_bytes())
    files["p.jsonl"].write_text('{"prompt": "a"}\n')
    files["link.json"].symlink_to(tmp_path / "o.json")
    few = ["--prompts", files["p.jsonl"], "-n", 2]
    out = ["-o", tmp_path / "o.json"]
    for name in ("o.json", "o.json.part", "link.json"):
        refused(run(bench, *few, *out, "--markdown", tmp_path / name, "--force"), name)
    swept = ["--sweep", "margin:1", "--threshold", 1, "--write-preset", tmp_path / "o.json"]
    refused(run(bench, *few, *out, *swept), "o.json")
    refused(run(bench, *few, "-o", files["p.jsonl"], "--force"), "p.jsonl")
    mine = ["-m", files["target.gguf"], "-c", 256, "-t", 1]
    for more in (mine, [*mine[2:], "-m", tiny[0], "-d", files["target.gguf"]]):
        refused(run(bench, *few, *more, "-o", files["target.gguf"], "--force", models=False), "target.gguf", "--output")
    refused(run(explain, "Tell.", *mine, "-o", files["target.gguf"], "--force", models=False), "target.gguf")
    assert files["p.jsonl"].read_text() == '{"prompt": "a"}\n'
    assert files["target.gguf"].read_bytes() == tiny[0].read_bytes() and not (tmp_path / "o.json").exists()


@pytest.fixture
def stopped_after(monkeypatch):
    """stopped_after(n): a benchmark is interrupted behind its nth measurement."""

    @contextlib.contextmanager
    def stop(n):
        add = Journal.add

        def stopped(self, measured):
            add(self, measured)
            if len(self.measured) == n:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "add", stopped)
            yield

    return stop


@pytest.mark.parametrize("more", [[], ["--parallel", "1,2"]], ids=["alone", "several"])
def test_bench_goes_on_where_it_was_stopped(run, tmp_path, stopped_after, more):
    arguments = ["--limit", 4, "-n", 6, "-s", "exact lookup", "-o", tmp_path / "b.json", *more]
    part = tmp_path / "b.json.part"
    with stopped_after(7):
        result = run(bench, *arguments)
    assert result.exit_code == 130 and "the same command to resume." in result.stderr
    machine, *kept = [json.loads(line) for line in part.read_text().splitlines()[1:]]
    assert len(kept) == 7
    with open(part, "a") as file:
        file.write('{"torn')
    refused(run(bench, *arguments, "-s", "margin:0.3"), "with other settings", "--force")
    result = run(bench, *arguments)
    assert result.exit_code == 0 and "7 measurements of an earlier start taken over" in result.stderr, result.output
    assert len([line for line in result.stderr.splitlines() if line.endswith(" tokens/s")]) >= 2, "one for each prompt"
    record = json.loads((tmp_path / "b.json").read_text())
    assert machine == {"machine": record["machine"]} and len(record["resumed"]) == 1
    measured = record["measured"]
    n = 4 * 4 * (2 if more else 1)
    assert len({(m["prompt"], m["setting"], m["n_parallel"]) for m in measured}) == len(measured) == n
    by_key = {(m["prompt"], m["setting"], m["n_parallel"]): m for m in measured}
    for row in kept if not more else []:
        again = by_key[row["prompt"], row["setting"], 1]
        assert (again["output"], again["arrivals"], again["rounds"]) == (row["output"], row["arrivals"], row["rounds"])
        assert again["stats"].keys() == row["stats"].keys()
    assert not part.exists()


def test_measurements_with_other_lookup_texts_do_not_go_on(run, tmp_path, stopped_after):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("Once upon a time.")
    arguments = ["--limit", 2, "-n", 4, "-s", "exact lookup", "--lookup-texts", texts, "-o", tmp_path / "b.json"]
    with stopped_after(3):
        run(bench, *arguments)
    (texts / "a.txt").write_text("Once upon a hill.")
    refused(run(bench, *arguments), "lookup_texts", "--force")
    (texts / "a.txt").write_text("Once upon a time.")
    result = run(bench, *arguments)
    assert result.exit_code == 0 and "3 measurements of an earlier start taken over" in result.stderr, result.output


def test_a_benchmark_that_overwrites_is_resumed(run, tmp_path, stopped_after):
    """As the message of its interruption says: without --force, though the file is there."""
    page = tmp_path / "b.md"
    arguments = ["--limit", 2, "-n", 4, "-o", tmp_path / "b.json", "--markdown", page]
    assert run(bench, *arguments).exit_code == 0
    refused(run(bench, *arguments), "exists already")
    page.unlink()
    page.write_text("old")
    with stopped_after(3):
        assert run(bench, *arguments, "--force").exit_code == 130
    result = run(bench, *arguments)
    assert result.exit_code == 0 and "3 measurements of an earlier start taken over" in result.stderr, result.output
    assert page.read_text() != "old"


def test_measurements_with_other_kernels_do_not_go_on(run, tmp_path, stopped_after):
    arguments = ["--limit", 2, "-n", 4, "-o", tmp_path / "b.json"]
    with stopped_after(1):
        run(bench, *arguments)
    part = tmp_path / "b.json.part"
    first, *rest = part.read_text().splitlines(keepends=True)
    began = json.loads(first)
    *_, attention = began["identity"]["kernels_used"]
    began["identity"]["kernels_used"] = [attention]
    part.write_text("".join([json.dumps(began) + "\n", *rest]))
    refused(run(bench, *arguments), "with other kernels_used")


def test_one_benchmark_at_a_time_keeps_its_measurements_in_a_file(tmp_path):
    one = Journal(tmp_path / "b.json.part", {"a": 1}, {})
    for force in (False, True):
        with pytest.raises(OutputError, match=r"another process keeps its measurements in .*b\.json\.part; wait"):
            Journal(tmp_path / "b.json.part", {"a": 1}, {}, force)
    one.release()
    with pytest.raises(OutputError, match="with other a"):
        Journal(tmp_path / "b.json.part", {"a": 2}, {})
    two = Journal(tmp_path / "b.json.part", {"a": 1}, {})
    two.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["precious notes", "precious notes\n", "\n"])
def test_a_file_of_something_else_stays(tmp_path, text):
    path = tmp_path / "p"
    path.write_text(text)
    with pytest.raises((OutputError, DataError), match="p"):
        Journal(path, {}, {})
    assert path.read_text() == text
    Journal(path, {}, {}, force=True).release()


@pytest.mark.parametrize("n_bytes", [0, 5, 12, 17])
def test_a_journal_whose_first_line_was_cut_off_begins_anew(tmp_path, n_bytes):
    path = tmp_path / "p"
    Journal(path, {"model": "caf\udce9"}, {}).release()
    whole = path.read_bytes()
    Journal(path, {"model": "caf\udce9"}, {}).release()  # the same one
    path.write_bytes(whole[:n_bytes])
    Journal(path, {"model": "caf\udce9"}, {}).release()
    assert path.read_bytes() == whole


def test_a_line_that_is_no_measurement(tmp_path):
    Journal(tmp_path / "p", {}, {}).release()
    with open(tmp_path / "p", "a") as file:
        file.write('{"prompt": "1"}\n')
    journal = Journal(tmp_path / "p", {}, {})
    with pytest.raises(OutputError, match=r"p .* line .*--force"):
        journal.restore([BenchPrompt("1", "", ("x",))])


def test_bench_without_a_file_goes_on_too(run, tmp_path, stopped_after):
    arguments = ["--limit", 2, "-n", 6, "-s", "exact lookup", "--json"]
    folder = tmp_path / "state" / "pyfly-cpp" / "bench"
    folder.mkdir(parents=True)
    (folder / "old.part").write_text("")
    os.utime(folder / "old.part", (0, 0))
    with stopped_after(3):
        result = run(bench, *arguments)
    (part,) = folder.iterdir()
    assert result.exit_code == 130 and result.stdout == ""
    assert f"Progress is saved in {part}" in result.stderr
    assert run(bench, *arguments, "--without-plain").exit_code == 0, "another benchmark has a place of its own"
    result = run(bench, *arguments)
    assert result.exit_code == 0 and "3 measurements of an earlier start taken over" in result.stderr, result.output
    assert len(json.loads(result.stdout)["measured"]) == 8
    assert not list(folder.iterdir())
    (tmp_path / "state" / "pyfly-cpp" / "bench").rmdir()
    (tmp_path / "state" / "pyfly-cpp" / "bench").write_text("in the way")
    result = run(bench, *arguments)
    assert result.exit_code == 0 and "measurements are not kept: " in result.stderr


def test_bench_of_several_at_once(run, tmp_path):
    files = ["-o", tmp_path / "b.json", "--markdown", tmp_path / "b.md"]
    few = ["-s", "exact lookup adaptive", "--limit", 4, "--max-tokens", 12]
    result = run(bench, *few, "--parallel", "3,1", "--details", *files)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "b.json").read_text())
    assert record["parallel"] == [1, 3] and len(record["measured"]) == 4 * 4 * 2 == 4 * len(record["loads"])
    assert record["loads"][0]["seconds_first_token"]["p95"] > 0 and record["models"]["n_ctx"] == 1024
    assert "first token" in result.stdout and "| plain | 3 |" in (tmp_path / "b.md").read_text()
    assert result.stdout.count("┏") == 2 and "exact, fixed length" in result.stdout
    refused(run(bench, *few, "--parallel", 5), "5 requests at a time need as many prompts", "there are 4")
    refused(run(bench, *few, "--parallel", "1,x"), "is not a number of requests")
    refused(run(bench, *few, "--parallel", 2, "--plot", tmp_path / "p.png"), "--plot")


@pytest.mark.parametrize("command", [bench, explain])
def test_the_demo_model_is_the_default(run, tiny, tmp_path, monkeypatch, command):
    monkeypatch.setattr(loading, "embedded_model", lambda: tiny[0])
    few = ["--limit", 1] if command is bench else ["Tell.", "-o", tmp_path / "e.html", "--gate", "margin:0.3"]
    result = run(command, *few, "-n", 4, "-c", 256, "-t", 1, models=False)
    assert result.exit_code == 0, result.output
    assert f"Using the demo model (no --model given), {tiny[0].name}" in result.stderr


@pytest.mark.alike
@pytest.mark.parametrize("more", [[], ["--parallel", "2"]])
def test_bench_at_a_temperature(run, tmp_path, more):
    few = ["-s", "stochastic", "--limit", 2, "-n", 12, "--temperature", 1.5, "--seed", 3, *more]
    result = run(bench, *few, "-o", tmp_path / "b.json")
    assert result.exit_code == 0, result.output
    assert "temperature 1.5, seeds 3 to 4" in result.stdout
    record = json.loads((tmp_path / "b.json").read_text())
    assert (record["temperature"], record["seed"]) == (1.5, 3)
    again = run(bench, *few, "-o", tmp_path / "c.json")
    greedy = run(bench, *few[:6], *more, "-o", tmp_path / "d.json")
    assert again.exit_code == greedy.exit_code == 0

    def plain(name):
        measured = json.loads((tmp_path / f"{name}.json").read_text())["measured"]
        return sorted((m["prompt"], m["output"]) for m in measured if m["setting"] == "plain")

    assert plain("b") == plain("c") != plain("d")


def test_a_sweep_and_its_preset(run, tmp_path, monkeypatch):
    prompts, preset = tmp_path / "p.jsonl", tmp_path / "preset.json"
    prompts.write_text("".join(json.dumps({"prompt": f"How many are {i} and {i}?"}) + "\n" for i in range(5)))
    arguments = ["--prompts", prompts, "-n", 8, "--sweep", "margin:0.1,2"]
    result = run(bench, *arguments, "--json", "--threshold", 2, "--write-preset", preset)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    points = {one["setting"]: one["agreement"]["estimate"] for one in record["sweep"]}
    assert list(points) == ["exact", "margin:0.1", "margin:2"] and points["exact"] == 1 >= points["margin:2"]
    assert [s["setting"] for s in record["summaries"]] == ["plain", "exact adaptive", *points]
    loaded = load_preset(preset)
    assert str(loaded.decoding.gate) == "margin:2" and loaded.decoding.window == loaded.decoding.gate.window
    assert loaded.claim["n_prompts"] == 5 and "The preset is margin:2, as asked for" in loaded.claim["sentence"]
    assert loaded.claim["sentence"] in " ".join(result.stderr.split()) and loaded.claim["models"] == record["models"]
    used = run(bench, "--preset", preset, "--limit", 2, "--max-tokens", 8, "-c", 512, models=False)
    assert used.exit_code == 0, used.output
    refused(run(bench, *arguments, "--threshold", 2, "--write-preset", preset), "exists already", "--force")
    for number, is_written in ((1, True), (0, False)):
        file = tmp_path / f"{number}.json"
        monkeypatch.setattr("pyfly_cpp.cli.bench.fastest", lambda points, _, n=number: points[n])
        result = run(bench, *arguments, "--least-agreement", 0.9, "--write-preset", file)
        assert result.exit_code == 0 and "agreement with exact" in result.stdout, result.output
        assert file.exists() == is_written == ("chat --preset" in result.stderr) and file.name in result.stderr
    refused(run(bench, "--preset", tmp_path / "none.json", models=False), "cannot be read")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sweep", "margn"], "Did you mean 'margin'"),
        (["--sweep", "exact-first:8"], "gate with a threshold"),
        (["--sweep", "typical"], "give thresholds of typical"),
        (["--sweep", "margin:0.1,x"], "write numbers"),
        (["--sweep", "margin:-1"], "tau"),
        (["--sweep", "margin", "--parallel", 2], "leave out --sweep or --parallel"),
        (["--threshold", 1], "are for --write-preset"),
        (["--write-preset", "p.json"], "add, for example, --sweep margin"),
        (["--sweep", "margin", "--write-preset", "p.json"], "no threshold is best for all"),
        (["--sweep", "margin:1,2", "--write-preset", "p.json", "--threshold", 3], "which are 1, 2"),
        (["--sweep", "margin", "--write-preset", "p.json", "--least-agreement", 0.9, "--limit", 4], "at least 5"),
    ],
)
def test_sweeps_that_cannot_be(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    refused(run(bench, *arguments), words)


@pytest.fixture
def heads(tiny):
    """Arguments that load the model with an MTP head of its own, and those of the other with an EAGLE-3 head."""
    hybrid, head = (tiny[0].with_name(f"tiny-{name}-f16.gguf") for name in ("qwen35-mtp", "llama-eagle3"))
    if not (hybrid.exists() and head.exists()):
        pytest.skip("the models with heads are not there")
    rest = ["-c", "512", "-t", "1"]
    return ["-m", str(hybrid), *rest], ["-m", str(tiny[0]), "--drafter", f"eagle3:{head}", *rest]


@pytest.mark.parametrize(
    ("fields", "draft", "is_plain"),
    [
        ({"drafter": "draft", "draft_max": 0}, False, True),
        ({"drafter": None, "draft_max": 0}, False, True),
        ({"drafter": None, "draft_max": 0, "gate": "margin:0.5"}, True, False),
        ({"drafter": None}, True, False),
    ],
    ids=["no drafts", "no drafter", "another's drafter", "another's drafts"],
)
def test_a_preset_drafts_alike_everywhere(run, tiny, data, tmp_path, fields, draft, is_plain):
    """One that drafts nothing is plain; one without a drafter drafts with the file that is given."""
    if fields["drafter"] is not None:
        fields = {**fields, "drafter": {"kind": "draft", "model_path": str(tiny[1])}}
    (tmp_path / "p.json").write_text(json.dumps({"format": 1, "model": str(tiny[0]), **fields}))
    short = ["--preset", tmp_path / "p.json", "-n", 8, "-c", 512, "-t", 1, *(["-d", tiny[1]] if draft else [])]
    result = run("complete", "--raw", "--json", *short, "One.", models=False)
    answer = json.loads(result.stdout)
    assert (answer["stats"]["drafted"] == 0) == is_plain, "complete, as chat and serve"
    name = "plain" if is_plain else fields.get("gate", "exact")
    result = run(bench, *short, "--limit", 1, "--json", models=False)
    measured = {one["setting"]: one["stats"]["drafted"] for one in json.loads(result.stdout)["measured"]}
    assert set(measured) == {"plain", "exact adaptive", "exact", name} and (measured[name] == 0) == is_plain
    eval_data = ["gsm8k", "--data", data / "gsm8k_sample.jsonl", "--limit", 1, "-o", tmp_path / "runs", "--json"]
    result = run(evaluate, *eval_data, *short, models=False)
    assert json.loads(result.stdout)["run"]["settings"] == [one for one in measured if one != "exact adaptive"]


def test_a_draft_that_nothing_drafts_with_is_refused(run, data, tmp_path):
    contradiction = "--draft and --drafter lookup contradict each other; leave one out."
    of_eval = ["gsm8k", "--data", data / "gsm8k_sample.jsonl", "--limit", 1, "-n", 4, "-o", tmp_path / "runs"]
    for command in (["complete", "x"], ["chat"], [bench, "-n", 4, "--limit", 1], [evaluate, *of_eval]):
        refused(run(*command, "--drafter", "lookup"), contradiction)
        refused(run(*command, "--drafter", "draft", "--lookup-texts", "x"), "--lookup-texts is for --drafter lookup;")
    result = run(bench, "-n", 4, "--limit", 1, "--drafter", "lookup", "-s", "exact draft")
    assert result.exit_code == 0, "a setting drafts with it"
    refused(run(bench, "--drafter", "none"), "needs a drafter")
    result = run(explain, "One.", "-n", 4, "--drafter", "draft", "-s", "exact lookup", "-o", tmp_path / "e.html")
    assert result.exit_code == 0, "the default drafter would draft with it"


@pytest.mark.slow
def test_heads_in_bench_and_eval(run, heads, data, tmp_path):
    own, eagle3 = heads
    few = ["--limit", 2, "--max-tokens", 12]
    result = run(bench, *own, *few, "-s", "exact lookup", "-o", tmp_path / "m.json", models=False)
    assert result.exit_code == 0, result.output
    assert "MTP head (the model has an MTP head)" in result.stdout
    record = json.loads((tmp_path / "m.json").read_text())
    exact = next(m for m in record["measured"] if m["setting"] == "exact")
    assert exact["stats"]["accepted_by_drafter"]["MTP"] > 0 and record["models"]["drafter"][0]["kind"] == "mtp"
    result = run(bench, *eagle3, *few, "-o", tmp_path / "e.json", models=False)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "e.json").read_text())
    assert [file["file"] for file in record["models"]["draft_files"]] == ["tiny-llama-eagle3-f16.gguf"]
    sample = ["gsm8k", "--data", data / "gsm8k_sample.jsonl", *few]
    for i, arguments in enumerate((*heads, *([*one, "--parallel", 2] for one in heads))):
        result = run(evaluate, *sample, *arguments, "-o", tmp_path / f"{i}", models=False)
        assert result.exit_code == 0, result.output
        lines = [json.loads(line) for line in (tmp_path / f"{i}" / "items.jsonl").read_text().splitlines()]
        assert {line["setting"] for line in lines} == {"plain", "exact"}
        for item in {line["item"] for line in lines}:
            assert len({line["output"] for line in lines if line["item"] == item}) == 1
    refused(run(evaluate, *sample, *own, "-o", tmp_path / "0", "--drafter", "lookup", models=False), "other drafter")
    refused(run(bench, *own, *few, "-s", "exact eagle3", models=False), "write eagle3:FILE")
    refused(run(bench, *own, *few, "--drafter", "eagel3", models=False), "Did you mean 'eagle3'")
    refused(run(bench, *few, "--drafter", "mtp"), "no MTP head")


def test_explain(run, tmp_path):
    path = tmp_path / "e.html"
    result = run(explain, "How many <b>apples</b>?", "-s", "margin:0.5", "--max-tokens", 24, "-o", path)
    assert result.exit_code == 0, result.output
    page = path.read_text(encoding="utf-8")
    assert "How many &lt;b&gt;apples&lt;/b&gt;?" in page and "margin:0.5" in page and result.stdout.strip()
    assert run(explain, "Tell.", "-n", 4, "--force", "-o", path, "--gate", "margin:0.7").exit_code == 0
    assert "margin:0.7" in path.read_text(encoding="utf-8")
    assert run(explain, "Tell.", "-n", 4, "--force", "-o", path).exit_code == 0
    assert "Lossless" in path.read_text(encoding="utf-8"), "no gate was asked for"
    assert "exact adaptive" in path.read_text(encoding="utf-8"), "drafts are governed, as in chat"
    for fixed, shown in (("exact k=2", "exact k=2"), ("exact no-adaptive", "exact no-adaptive"), ("plain", "plain")):
        assert run(explain, "Tell.", "-n", 4, "--force", "-o", path, "-s", fixed).exit_code == 0
        page = path.read_text(encoding="utf-8")
        assert f"; {shown}." in page and ("full length" in page) == (fixed != "plain")
    refused(run(explain, "x", "-o", path), "exists already")
    refused(run(explain, " ", "-o", tmp_path / "f.html"), "the prompt is empty")
    refused(run(explain, "x", "-s", "margn:1", "-o", tmp_path / "f.html"), "Did you mean 'margin'")
    refused(run(explain, "word " * 3000, "-o", tmp_path / "f.html"), "the context holds 1024")
    assert not (tmp_path / "f.html").exists()
