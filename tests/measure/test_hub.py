"""Rows from the hub: the data sets' own names and fields, and what is said where they cannot be had."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from pyfly_cpp.machine.rows import DataError
from pyfly_cpp.measure.tasks.registry import TASKS, get_task

GSM8K = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A thousand and one?", "answer": "Add them.\n#### 1,001"},
]
MBPP = {"source_file": "Benchmark Questions Verification V2.ipynb", "prompt": "Write f.", "test_imports": [],
        "code": "def f():\r\n    return 1", "test_list": ["assert f() == 1"]}  # fmt: skip
CSQA = {"id": "1afa02df02c908a558b4036e80242fac", "question": "Where?", "question_concept": "place",
        "choices": {"label": ["A", "B", "C", "D", "E"], "text": ["a", "b", "c", "d", "e"]}}  # fmt: skip
MMLU = {"question": "Who?", "subject": "law", "choices": ["a", "b", "c", "d"]}


def mgsm(question):
    return [{"question": question, "answer": None, "answer_number": 18, "equation_solution": None}]


HUB = {
    ("openai/gsm8k", "main", "test"): GSM8K,
    ("openai/gsm8k", "main", "train"): [{"question": "One and one?", "answer": "#### 2"}],
    ("juletxara/mgsm", "de", "test"): mgsm("Wie viel?"),
    ("juletxara/mgsm", "fr", "test"): mgsm("Combien ?"),
    ("juletxara/mgsm", "th", "test"): mgsm("เท่าไร"),
    ("openai/openai_humaneval", None, "test"): [
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n",
         "test": "def check(f):\n    assert f() == 1\n", "entry_point": "f"}
    ],
    ("google-research-datasets/mbpp", "sanitized", "test"): [{**MBPP, "task_id": 11}],
    ("google-research-datasets/mbpp", "sanitized", "prompt"): [{**MBPP, "task_id": 2}, {**MBPP, "task_id": 3}],
    ("tau/commonsense_qa", None, "validation"): [{**CSQA, "answerKey": "B"}],
    ("tau/commonsense_qa", None, "train"): [{**CSQA, "answerKey": "C"}],
    ("cais/mmlu", "all", "test"): [{**MMLU, "answer": 0}, {**MMLU, "answer": 3}],
    ("cais/mmlu", "all", "dev"): [{**MMLU, "answer": 1}],
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    """The hub as far as we look into it; returns what was asked for."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, name=None, split=None):
        asked.append((path, name, split))
        return datasets.Dataset.from_list(HUB[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


ITEMS = {
    "gsm8k": [("gsm8k-test-0", {"answer_number": "4"}), ("gsm8k-test-1", {"answer_number": "1001"})],
    "mgsm": [(f"mgsm-{language}-0", {"language": language, "answer_number": "18"}) for language in ("de", "fr", "th")],
    "humaneval": [("HumanEval/0", {"prompt": "def f():\n", "entry_point": "f"})],
    "mbpp": [("mbpp-11", {"test_list": ["assert f() == 1"], "test_imports": [], "original_split": "test"})],
    "commonsenseqa": [
        ("csqa-validation-1afa02df02c908a558b4036e80242fac", {"choices": ["a", "b", "c", "d", "e"], "answer": "B"})
    ],
    "mmlu": [("mmlu-test-0", {"subject": "law", "answer": "A"}), ("mmlu-test-1", {"answer": "D"})],
}


def test_every_task_with_a_data_set_is_here():
    assert set(ITEMS) == {name for name, task in TASKS.items() if task.hub}


@pytest.mark.parametrize("name", ITEMS)
def test_items(hub, name):
    task = get_task(name)
    items = task.read_hub()
    assert hub == [tuple(split) for split in task.hub]
    assert [item.id for item in items] == [name for name, _ in ITEMS[name]]
    for item, (_, fields) in zip(items, ITEMS[name]):
        assert {key: item.fields[key] for key in fields} == fields
        assert task.messages(item)[-1]["content"].strip()


@pytest.mark.parametrize("name", ["gsm8k", "mbpp", "commonsenseqa", "mmlu"])
def test_worked_examples(hub, name):
    task = get_task(name)
    examples = task.read_hub(examples=True)
    assert hub == [tuple(task.hub_examples)]
    picked = task.pick_examples(task.read_hub()[0], examples, 1)
    assert task.worked_answer(picked[0]).strip()


def test_what_they_do_not_have(hub):
    with pytest.raises(DataError, match="writing needs its items; give a JSONL file with --data"):
        get_task("writing").read_hub()
    with pytest.raises(DataError, match="mgsm needs its worked examples; give a JSONL file with --examples"):
        get_task("mgsm").read_hub(examples=True)


@pytest.mark.parametrize(
    ("name", "split", "row", "message"),
    [
        (
            "gsm8k",
            ("openai/gsm8k", "main", "test"),
            {"question": "?"},
            r"\(main, test\), line 1: .*'answer' is missing",
        ),
        ("gsm8k", ("openai/gsm8k", "main", "test"), {"question": "?", "answer": "#### "}, "'answer_number' is empty"),
        ("mmlu", ("cais/mmlu", "all", "test"), {**MMLU, "answer": 4}, "must be a letter of A..D, not '4'"),
        (
            "commonsenseqa",
            ("tau/commonsense_qa", None, "validation"),
            {**CSQA, "answerKey": ""},
            "'answerKey' is empty",
        ),
        ("commonsenseqa", ("tau/commonsense_qa", None, "validation"), {**CSQA, "choices": ["a"]}, "labels A to E"),
    ],
)
def test_rows_that_changed(hub, monkeypatch, name, split, row, message):
    monkeypatch.setitem(HUB, split, [row])
    with pytest.raises(DataError, match=message):
        get_task(name).read_hub()


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"JSONL file with --data, or install `datasets` \(`pip install 'pyfly-cpp\[data\]'"
    ):
        get_task("gsm8k").read_hub()


def test_no_connection(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*_, **__):
        assert not logging.getLogger("huggingface_hub.utils").isEnabledFor(logging.WARNING), "it tells each attempt"
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    expected = (
        r"openai/gsm8k \(main, test\) cannot be loaded .*Couldn't reach.*connection, or give a JSONL file with --data"
    )
    with pytest.raises(DataError, match=expected) as caught:
        get_task("gsm8k").read_hub()
    assert "\n" not in str(caught.value)


def test_the_command(hub, model_arguments, tmp_path):
    testing = pytest.importorskip("click.testing")
    from pyfly_cpp.cli import cli

    arguments = [
        "eval",
        "gsm8k",
        "--few-shot",
        "1",
        "--max-tokens",
        "8",
        "--without-plain",
        "-o",
        str(tmp_path / "run"),
    ]
    result = testing.CliRunner().invoke(cli, [*arguments, *model_arguments])
    assert result.exit_code == 0, result.output
    assert hub == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]
    assert "2 items of openai/gsm8k (main, test); 1 worked example;" in (tmp_path / "run" / "table.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "items.jsonl").read_text().splitlines()]
    assert {line["item"] for line in lines} == {"gsm8k-test-0", "gsm8k-test-1"} and "One and one?" in lines[0]["prompt"]
