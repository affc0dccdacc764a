"""Tasks: reading rows, asking, and scoring with known verdicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutations import returns_nothing, slightly_wrong

from pyfly_cpp.machine.rows import DataError, spread
from pyfly_cpp.measure.tasks.humaneval import HumanEval
from pyfly_cpp.measure.tasks.mbpp import Mbpp
from pyfly_cpp.measure.tasks.registry import TASKS, get_task
from pyfly_cpp.measure.tasks.task import Item
from pyfly_cpp.measure.tasks.writing import breakdown

GOOD = {
    "gsm8k": {"id": "1", "question": "2+2?", "answer": "It is 4.\n#### 4", "answer_number": "4"},
    "mgsm": {"id": "1", "language": "de", "question": "2+2?", "answer_number": "4"},
    "humaneval": {"id": "1", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    assert f() == 1"},
    "mbpp": {
        "id": "1",
        "prompt": "Write f.",
        "test_imports": [],
        "test_list": ["assert f() == 1"],
        "code": "def f(): return 1",
    },
    "commonsenseqa": {"id": "1", "question": "Where?", "choices": ["a", "b", "c", "d", "e"], "answer": "E"},
    "mmlu": {"id": "1", "subject": "law", "question": "Who?", "choices": ["a", "b", "c", "d"], "answer": "D"},
    "needle": {"id": "1", "input": "text", "query": "old-oar", "outputs": ["12", "34"]},
    "writing": {"id": "1", "prompt": "Write."},
}


def write(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def test_gsm8k_as_it_is_published(tmp_path):
    rows = [{"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}, {"question": "?", "answer": "#### 1,234"}]
    items = get_task("gsm8k").read(write(tmp_path / "a.jsonl", *rows))
    assert [item.fields["answer_number"] for item in items] == ["4", "1234"]
    assert len({item.id for item in items}) == 2


def test_every_task_has_a_good_row():
    assert set(GOOD) == set(TASKS)


@pytest.mark.parametrize("name", GOOD)
def test_reads_and_asks(name, tmp_path):
    task = get_task(name)
    (item,) = task.read(write(tmp_path / "a.jsonl", GOOD[name], ""))
    messages = task.messages(item)
    assert messages[-1]["role"] == "user" and messages[-1]["content"].strip()
    assert all(isinstance(text, str) and text for text in task.stop(item))


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_or_wrong_field_is_named(name, tmp_path):
    task = get_task(name)
    for field in GOOD[name]:
        if field in ("answer", "code") and name in ("gsm8k", "mbpp"):
            continue  # only worked examples need them
        broken = {k: v for k, v in GOOD[name].items() if k != field}
        if (name, field) == ("gsm8k", "answer_number"):
            del broken["answer"]  # which has the number, too
        with pytest.raises(DataError, match=rf"b\.jsonl, line 2: the field '{field}' is missing"):
            task.read(write(tmp_path / "b.jsonl", {**GOOD[name], "id": "0"}, broken))
        with pytest.raises(DataError, match=rf"b\.jsonl, line 1: the field '{field}' must be"):
            task.read(write(tmp_path / "b.jsonl", {**GOOD[name], field: 3.5}))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "line 1: not JSON"),
        (['{"id": "1", "prompt": "a \\ud83d"}'], "line 1: half of a surrogate pair"),
        ([json.dumps(GOOD["writing"]), "[1]"], "line 2: a list, not an object"),
        ([json.dumps(GOOD["writing"])] * 2, "line 2: the id '1' is that of line 1"),
        ([""], "has no rows"),
        ([json.dumps({"id": "1", "prompt": "  "})], "'prompt' is empty"),
    ],
)
def test_malformed_files(rows, message, tmp_path):
    with pytest.raises(DataError, match=message):
        get_task("writing").read(write(tmp_path / "c.jsonl", *rows))


def test_not_utf8_and_not_there(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"id": "1", "prompt": "ok"}\n{"id": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        get_task("writing").read(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        get_task("writing").read(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        get_task("writing").read(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mgsm", {"language": "xx"}, "'language' must be one of de, fr, th"),
        ("mmlu", {"answer": "E"}, r"'answer' must be a letter of A\.\.D"),
        ("mmlu", {"choices": ["a"]}, "'choices' must have 4 texts"),
        ("humaneval", {"entry_point": "f()"}, "must be a function's name"),
        ("commonsenseqa", {"choices": [1, 2, 3, 4, 5]}, "must be a list of texts"),
    ],
)
def test_wrong_values(name, change, message, tmp_path):
    with pytest.raises(DataError, match=message):
        get_task(name).read(write(tmp_path / "e.jsonl", {**GOOD[name], **change}))


@pytest.mark.parametrize("name", ["gsm8k", "mbpp", "mmlu", "commonsenseqa"])
def test_worked_examples_are_right_answers(name, tmp_path, containment):
    task = get_task(name) if name != "mbpp" else Mbpp(containment=containment)
    (item,) = task.read(write(tmp_path / "f.jsonl", GOOD[name]))
    messages = task.messages(item, task.pick_examples(item, [item], 1))
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    answer = messages[1]["content"].replace("```python\n", "")
    assert task.score(item, answer, []).correct


def test_mmlu_takes_examples_of_the_subject(tmp_path):
    task = get_task("mmlu")
    rows = [{**GOOD["mmlu"], "id": str(i), "subject": subject} for i, subject in enumerate(["law", "art", "law"])]
    items = task.read(write(tmp_path / "g.jsonl", *rows))
    assert [example.id for example in task.pick_examples(items[0], items, 5)] == ["0", "2"]


def test_unknown_task():
    with pytest.raises(ValueError, match="Did you mean 'humaneval'"):
        get_task("human-eval")


# ---- Code ------------------------------------------------------------------------------------------------------------


def code_cases(data, containment):
    for task, key in (
        (HumanEval(containment=containment), "canonical_solution"),
        (Mbpp(containment=containment), "code"),
    ):
        path = data / f"{task.name}_sample.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for item, row in zip(task.read(path), rows):
            yield task, item, row, row[key]


def test_reference_solutions_pass(data, containment):
    cases = list(code_cases(data, containment))
    assert len(cases) >= 20
    for task, item, _, solution in cases:
        verdict = task.score(item, solution, [])
        assert verdict.correct, (item.id, verdict.detail)
        assert task.score(item, solution + "\n```\nThat is all.", []).correct


def test_mutated_solutions_fail(data, containment):
    n_small = n_caught = 0
    for task, item, row, solution in code_cases(data, containment):
        whole = row["prompt"] + solution if task.name == "humaneval" else solution
        before = solution + "\n" if task.name == "humaneval" else ""
        assert not task.score(item, before + returns_nothing(whole), []).correct, item.id
        for mutant in slightly_wrong(whole)[:1]:
            n_small += 1
            n_caught += not task.score(item, before + mutant, []).correct
        for text, status in (("", None), ("    raise SystemExit(0)\n", "failed"), ("    this is not python", "failed")):
            verdict = task.score(item, text, [])
            assert not verdict.correct, (item.id, text)
            assert status is None or task.name == "mbpp" or verdict.detail["status"] == status
    assert n_caught >= 0.8 * n_small, f"the tests caught {n_caught} of {n_small} small mistakes"


# ---- Needle and writing ----------------------------------------------------------------------------------------------


def test_needles_are_there_and_reproducible():
    task = get_task("needle")
    items = task.generate(3, n_words=400, n_values=4, seed=7)
    assert (
        items == task.generate(3, n_words=400, n_values=4, seed=7) != task.generate(3, n_words=400, n_values=4, seed=8)
    )
    for item in items:
        assert all(item.fields["input"].count(value) == 1 for value in item.fields["outputs"])
        assert 360 < len(item.fields["input"].split()) < 520
        assert task.score(item, " ".join(item.fields["outputs"]), []).correct
        half = task.score(item, ", ".join(item.fields["outputs"][:2]), [])
        assert not half.correct and half.detail["recall"] == 0.5
    with pytest.raises(ValueError, match="at least"):
        task.generate(1, n_words=10)


def test_writing_counts_loops_and_breakdowns():
    task = get_task("writing")
    item = Item("1", {"prompt": "Write."})
    assert task.score(item, "A long walk along the quiet river.", list(range(10))).correct
    looped = task.score(item, "again and again " * 20, [1, 2, 3] * 20)
    assert not looped.correct and looped.detail == {"loop": True, "period": 3}
    assert task.score(item, "", []).extracted == "empty"


def test_breakdowns():
    words = [f"word{i}" for i in range(200)]
    tokens = list(range(300))
    assert breakdown(" ".join(words), tokens) == ""
    assert breakdown("one two", tokens) == "empty"
    assert breakdown("a few words and then \ufffd\ufffd\ufffd\ufffd", tokens) == "garbage"
    phrase = "the cat sat on a mat and saw that "
    assert breakdown(phrase * 20, tokens) == "repetitive"  # no true loop of tokens
    assert breakdown("anything at all goes here now", [7] * 40) == "loop"


def part(task, items, n):
    return spread(items, n, task.kind, lambda item: item.unit)


def test_a_part_is_spread(tmp_path):
    rows = [{**GOOD["writing"], "id": f"{prompt}{i}", "prompt_id": prompt} for prompt in "abc" for i in range(3)]
    task = get_task("writing")
    items = task.read(write(tmp_path / "w.jsonl", *rows))
    assert [item.id for item in part(task, items, 4)] == ["a0", "a1", "b0", "c0"]
    assert part(task, items, 99) == part(task, items, None) == items
    rows = [{**GOOD["mmlu"], "id": str(i), "subject": "law" if i < 3 else "art"} for i in range(5)]
    task = get_task("mmlu")
    assert [item.id for item in part(task, task.read(write(tmp_path / "m.jsonl", *rows)), 2)] == ["0", "3"]
    rows = [{**GOOD["gsm8k"], "id": str(i)} for i in range(5)]
    task = get_task("gsm8k")
    first = part(task, task.read(write(tmp_path / "g.jsonl", *rows)), 2)
    assert [item.id for item in first] == ["0", "1"], "items that are all alike: the first ones"
    rows = [
        {**GOOD["mgsm"], "id": f"{language}{i}", "language": language, "gsm8k_test_id": str(i)}
        for language in ("de", "fr")
        for i in range(4)
    ]
    task = get_task("mgsm")
    chosen = part(task, task.read(write(tmp_path / "l.jsonl", *rows)), 4)
    assert [item.id for item in chosen] == ["de0", "de2", "fr1", "fr3"], "no problem twice, as long as there are others"
    assert [item.unit for item in chosen] == ["0", "2", "1", "3"]
