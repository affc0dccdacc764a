"""benchmarks/machine.py and tables.py: the steps work, a run resumes, and every figure has its record."""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import common  # noqa: E402
import end_to_end  # noqa: E402
import machine  # noqa: E402
import provenance  # noqa: E402
import tables  # noqa: E402

from pyfly_cpp.machine import conditions  # noqa: E402

FEW = "loading,costs q4_k_m,answers q4_k_m 0"
"""A step of each way to measure, but for those that are slow to start."""


def run(record, *words, **environment):
    command = [
        sys.executable,
        str(BENCHMARKS / "machine.py"),
        "--quick",
        "--record",
        str(record),
        "--threads",
        "1",
        *words,
    ]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def read(record):
    with gzip.open(record, "rt") as file:
        return json.load(file)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A record with some steps."""
    path = tmp_path_factory.mktemp("records") / "machine-few.json.gz"
    done = run(path, "--steps", FEW)
    assert done.returncode == 0, done.stderr
    return path


def test_a_record_has_every_timing_and_its_conditions(few):
    data = read(few)
    assert list(data["steps"]) == FEW.split(",")
    assert {"cpu", "isa", "threads", "has_demo_model", "memory_bytes", "commit", "compilers", "timed_sources"} <= data[
        "machine"
    ].keys()
    assert data["models"]["q4_k_m"]["file"] == machine.TINY.name
    for step in data["steps"].values():
        assert step["measured"] and step["command"] and step["started"] and step["seconds"] > 0
    (row,) = data["steps"]["answers q4_k_m 0"]["measured"]
    assert list(row["answers"]) == ["llama.cpp", "plain", "auto"]
    (costs,) = data["steps"]["costs q4_k_m"]["measured"]
    assert [len(pairs) for pairs in costs["stock_and_ours"].values()] == [machine.QUICK.repeats] * len(
        machine.QUICK.rows
    )


def test_a_run_resumes(few):
    before = read(few)
    done = run(few, "--steps", FEW)
    assert done.returncode == 0 and read(few) == before, "nothing was left to do"
    done = run(few, "--steps", "loading", "--again")
    after = read(few)
    assert done.returncode == 0 and after["steps"]["loading"] != before["steps"]["loading"]
    assert after["steps"]["costs q4_k_m"] == before["steps"]["costs q4_k_m"]


def test_a_record_of_other_conditions_is_not_continued(few):
    before = read(few)
    done = run(few, "--steps", FEW, "--threads", "2")
    assert done.returncode == 1 and "threads" in done.stderr and "--again" in done.stderr
    assert read(few) == before


def test_wishes_that_cannot_be_met(few, tmp_path):
    assert "'nothing'" in run(few, "--steps", "nothing").stderr
    assert "*" in run(few, "--list").stdout
    without = [sys.executable, str(BENCHMARKS / "machine.py"), "--quick"]
    assert "--record" in subprocess.run(without, capture_output=True, text=True).stderr


def test_a_disturbed_step_is_done_again(monkeypatch):
    used = iter([1.0, 0.0])
    monkeypatch.setattr(machine, "wait_until_quiet", lambda: None)
    monkeypatch.setattr(machine, "in_process", lambda step, model: "measured")
    monkeypatch.setattr(conditions.Watch, "used", lambda self: next(used))
    step = machine.Step("costs", 1, None, print)
    assert machine.undisturbed(step, None, "abc", False)["used_by_others"] == 0.0
    monkeypatch.setattr(conditions.Watch, "used", lambda self: 1.0)
    with pytest.raises(SystemExit, match="disturbed"):
        machine.undisturbed(step, None, "abc", False)


def test_names_of_steps_differ():
    for scale in (machine.FULL, machine.QUICK):
        names = [step.name for step in machine.plan(scale, 1)]
        assert len(set(names)) == len(names)


def test_generations_of_processors():
    assert provenance.generation("AuthenticAMD", 0x19, 0x11) == "Zen 4"
    assert provenance.generation("AuthenticAMD", 0x19, 0x01) == "Zen 3"
    assert provenance.generation("GenuineIntel", 6, 0x8F) == "Sapphire Rapids"
    assert provenance.generation("GenuineIntel", 6, 0x01) is None


# ---- Tables ----------------------------------------------------------------------------------------------------------


def of_record(path, **changed):
    data = read(path)
    return tables.Loaded(path, {**data, "quick": False, "machine": {**data["machine"], **changed}})


def test_documents_have_the_tables_of_the_records():
    records = tables.read_records()
    for document in tables.DOCUMENTS:
        assert tables.written(document, records) == document.read_text(encoding="utf-8"), "run benchmarks/tables.py"
        for table in tables.tables_of(document, records).values():
            check_every_figure_has_its_record(table, document, records)


def check_every_figure_has_its_record(table, document, records):
    measured = [number for cell in table.cells() if cell.sources for number in tables.numbers(cell.text)]
    for number in measured:
        assert tables.trace(number, [document], records)
    for cell in table.cells():
        if not cell.sources:
            named = "".join(record.title for record in records)
            assert all(
                number in named or "." not in number for number in tables.numbers(cell.text) if number != "0.7"
            ), cell


def test_every_table(few, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("".join(f"Before.\n<!-- table {name} -->\n<!-- end -->\n" for name in tables.TABLES))
    record = of_record(few)
    document.write_text(tables.written(document, [record]))
    assert tables.written(document, [record]) == document.read_text()
    found = tables.tables_of(document, [record])
    for name in ("speed", "as-shipped", "costs", "loading", "claims"):
        assert found[name].rows, name
        check_every_figure_has_its_record(found[name], document, [record])
    assert tables.NOTHING in found["larger"].text() and tables.NOTHING in tables.tables_of(document, [])["speed"].text()


def test_a_number_is_traced_to_its_command(few, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- table costs -->\n<!-- end -->\n")
    record = of_record(few)
    (row, *_) = tables.tables_of(document, [record])["costs"].rows
    (line, *_) = tables.trace(row[4].text, [document], [record])
    assert few.name in line and "machine.py --steps 'costs q4_k_m'" in line
    assert tables.trace("123456.789", [document], [record]) == []
    forced = of_record(few, isa="avx2", isa_is_forced=True)
    assert "PYFLY_ISA=avx2 python " in tables.trace(row[4].text, [document], [forced])[0]
    assert "PYFLY_ISA=avx2 python " in tables.tables_of(page_of_claims(tmp_path), [forced])["claims"].text()


def test_figures_of_other_kernels_have_a_star(few, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- table costs -->\n<!-- end -->\n")
    for sources, is_present in ((of_record(few).data["machine"]["timed_sources"], True), ("others", False)):
        table = tables.tables_of(document, [of_record(few, timed_sources=sources)])["costs"]
        assert ("\\*" in table.rows[0][1].text) == (not is_present)
        assert ("an earlier version" in table.notes[0].text) == (not is_present)


@pytest.mark.parametrize("document", tables.DOCUMENTS[:2], ids=lambda path: path.name)
def test_every_ratio_that_was_written_by_hand_has_its_source(document):
    for passage in tables.passages(document):
        for number in re.findall(r"\d+\.\d+(?=x)", passage):
            lines = [line for line in tables.trace(number, [document], []) if repr(passage) in line]
            assert lines, f"no record or page beside {number} in {passage!r}"


def test_a_number_beside_a_record_has_its_command(tmp_path):
    record = tmp_path / "old.json.gz"
    machine = {"started": "2026-11-30T12:00:00+00:00"}
    record.write_bytes(gzip.compress(json.dumps({"command": "kernels.py --rows 1", "machine": machine}).encode()))
    document = tmp_path / "page.md"
    document.write_text(
        "```\n7.25 [record](old.json.gz)\n```\n\n| a | 7.25x | [record](old.json.gz) |\n"
        "| b | 8.5 | [page](c.md#d) |\n\n9.75 of [elsewhere](https://example.org/old.json.gz)\n"
    )
    (line,) = tables.trace("7.25", [document], [])
    assert "old.json.gz: kernels.py --rows 1 (30 November 2026)" in line and "| b |" not in line
    (line,) = tables.trace("8.5", [document], [])
    assert line.endswith("c.md#d")
    assert tables.trace("9.75", [document], []) == []


def test_a_figure_without_long_documents_does_not_name_them():
    for record in tables.read_records():
        for name in ("as-shipped", "estimates"):
            table = tables.TABLES[name]([record], tables.DOCUMENTS[1])
            assert not [cell for cell in table.cells() for source in cell.sources if "long documents" in source.step]


def test_machines_of_one_name_are_told_apart(few, tmp_path):
    data = {**read(few), "quick": False}
    for name, threads in (("machine-a", 1), ("machine-b", 1), ("machine-c", 8)):
        one = {**data, "machine": {**data["machine"], "threads": threads}}
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(one).encode()))
    a, b, c = (record.title for record in tables.read_records(tmp_path))
    assert a.endswith("1 thread, machine-a") and b.endswith("1 thread, machine-b") and c.endswith("8 threads")


@pytest.mark.parametrize("damage", [b"", b"no record", None])
def test_a_damaged_record_is_named(few, tmp_path, damage):
    path = tmp_path / "machine-damaged.json.gz"
    path.write_bytes(few.read_bytes()[:500] if damage is None else damage)
    with pytest.raises(SystemExit, match="machine-damaged"):
        tables.read_records(tmp_path)
    with pytest.raises(SystemExit, match="machine-damaged"):
        machine.Record(path, read(few)["machine"], begin_anew=False, is_quick=True)
    machine.Record(path, read(few)["machine"], begin_anew=True, is_quick=True)


def test_a_full_disk_leaves_the_record_as_it_was(few, tmp_path, monkeypatch):
    path = tmp_path / "machine-full.json.gz"
    path.write_bytes(few.read_bytes())
    record = machine.Record(path, read(few)["machine"], begin_anew=False, is_quick=True)

    def full(partial, data):
        partial.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SystemExit, match=r"machine-full.*No space"):
        record.add("another", {})
    assert path.read_bytes() == few.read_bytes() and list(tmp_path.iterdir()) == [path]


def test_a_step_ends_when_the_run_is_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        f"""
import functools, os, sys, time
sys.path.append({str(BENCHMARKS)!r})
import machine

def measure():
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    machine.in_process(machine.Step("sleep", 1, None, measure), None)
"""
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as run:
        assert int(run.stdout.readline())
        run.kill()
        begin = time.monotonic()
        assert run.stdout.read() == ""  # until nobody has its end of the pipe
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize("n", ["0", "-3"])
def test_threads_are_at_least_one(n, capsys):
    with pytest.raises(SystemExit) as left:
        machine.main(["--list", "--quick", "--record", "nowhere", "--threads", n])
    assert left.value.code == 2 and n in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words", "named"),
    [
        ("end_to_end", "--sides plain,auto", "llama.cpp must be"),
        ("end_to_end", "--sides llama.cpp", "ours"),
        ("end_to_end", "--sides llama.cpp,another", "another"),
        ("end_to_end", "--kinds another", "another"),
        ("end_to_end", "--temperature hot", "hot"),
        ("end_to_end", "--per-kind 0", "--per-kind"),
        ("end_to_end", "-n 0", "-n"),
        ("end_to_end", "--record nowhere/file.json.gz", "nowhere"),
        ("documents", "--sides flash", "ours"),
        ("documents", "--turns 0", "--turns"),
        ("kernels", "--rows 0,1", "--rows"),
        ("kernels", "--behind -1", "--behind"),
        ("kernels", "--repeats 0", "--repeats"),
        ("loading", "--turns 0", "--turns"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(script, words, named, monkeypatch, capsys):
    model = [str(machine.TINY)] if script == "loading" else ["--model", str(machine.TINY)]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *model, *words.split()])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    assert left.value.code == 2 and named in capsys.readouterr().err


def page_of_claims(folder):
    page = folder / "claims.md"
    page.write_text("<!-- table claims -->\n<!-- end -->\n")
    return page


@pytest.mark.parametrize("path", [tables.__file__, BENCHMARKS / "README.md"], ids=str)
def test_the_number_of_the_example_is_in_a_table(path):
    (number,) = re.findall(r"tables\.py --trace (\S+)", Path(path).read_text(encoding="utf-8"))
    assert tables.trace(number, tables.DOCUMENTS, tables.read_records())


def test_a_model_that_is_not_there_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as left:
        common.model_parser("", 96).parse_args(["--model", "nowhere.gguf"])
    assert left.value.code == 2 and "there is no model file 'nowhere.gguf'" in capsys.readouterr().err


def test_older_kernels_are_marked(few):
    title = of_record(few).title
    older = of_record(few, timed_sources="another").title
    assert older.startswith(title) and older != title
    assert "forced" in of_record(few, isa_is_forced=True).title and "forced" not in title


def test_what_ages_a_figure(tmp_path):
    """A change of code, not one of comments or lines."""
    for folder in provenance.TIMED:
        (tmp_path / folder).mkdir(parents=True)
    file = tmp_path / provenance.TIMED[0] / "file.h"

    def of(text):
        file.write_text(text)
        provenance.fingerprint.cache_clear()
        return provenance.fingerprint(tmp_path)

    first = of('int f(int a); // "of\nconst char * g = "//";\n')
    assert first == of("int f(\n    int a);\n/* it's\nof */ const char * g = \"//\"; // 1'000\n")
    assert (
        len({first, of('int f(int b);\nconst char * g = "//";\n'), of('int f(int a);\nconst char * g = "/";\n')}) == 3
    )
    provenance.fingerprint.cache_clear()


def test_a_table_that_there_is_not(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- table nothing -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="nothing"):
        tables.written(document, [])


def test_steps_by_their_rows():
    counters = {"rounds": 11, "beginnings": 1, "drafted_at_depth": [6, 4, 1]}
    assert tables.rows_of_steps(counters) == {1: 5, 2: 2, 3: 3, 4: 1}


def test_an_estimate_is_the_costs_of_the_steps():
    counters = {"rounds": 5, "beginnings": 1, "committed": 11, "committed_first": 1, "drafted_at_depth": [2, 2],
                "seconds_draft": 1.0}  # fmt: skip
    rows = [{"kind": "edit", "answers": {"auto": [[1, 2], 0.1, 0.2, counters]}}]
    costs = {"stock_and_ours": {"1": [[4.0, 2.0]], "2": [[8.0, 3.0]], "4": [[16.0, 5.0]]}}
    # three steps of one token, two of three: 3 * 2 + 2 * 4 + 1 s of drafting, for eleven tokens
    assert tables.estimated(rows, costs) == {"edit": pytest.approx(11 * 4.0 / 15.0)}


def test_ratios_by_kind():
    def row(kind, stock, ours):
        return {
            "kind": kind,
            "answers": {"llama.cpp": [[1] * stock, 0.0, 1.0, None], "auto": [[1] * ours, 0.0, 1.0, None]},
        }

    rows = [row("edit", 3, 5), row("edit", 3, 9), row("chat", 2, 2), row("story", 1, 9)]
    assert end_to_end.by_kind(rows, "auto") == {"edit": pytest.approx(8**0.5), "chat": 1.0}


@pytest.mark.slow
def test_every_step(tmp_path):
    record = tmp_path / "machine-all.json.gz"
    done = run(record)
    assert done.returncode == 0, done.stderr
    assert list(read(record)["steps"]) == [step.name for step in machine.plan(machine.QUICK, 1)]
    document = tmp_path / "page.md"
    document.write_text("".join(f"<!-- table {name} -->\n<!-- end -->\n" for name in tables.TABLES))
    for name, table in tables.tables_of(document, [of_record(record)]).items():
        assert table.rows or name == "server", name
