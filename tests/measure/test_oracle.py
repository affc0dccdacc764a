"""benchmarks/oracle.py: the walk of the oracle on tiny models, and what the report makes of it."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import oracle  # noqa: E402

from pyfly_cpp import DraftModel, Eagle3, FlyBatch  # noqa: E402
from pyfly_cpp.machine.rows import DataError  # noqa: E402
from pyfly_cpp.measure.generator import Prompt  # noqa: E402
from pyfly_cpp.measure.tasks.task import Item, Verdict  # noqa: E402

K, MOST = 4, 40
ITEM = Item("a", {})


class Anything:
    """A task of which every answer is right."""

    def score(self, item, text, tokens):
        return Verdict(True, text, "")


@pytest.fixture(scope="module", params=["draft", "head"])
def target(request, tiny):
    head = ROOT / "models" / "tiny" / "tiny-llama-eagle3-f16.gguf"
    drafter = DraftModel(tiny[1]) if request.param == "draft" else Eagle3(head, draft_max=K)
    with FlyBatch(tiny[0], 2, n_ctx=512, drafter=drafter, adaptive=False, n_threads=1, verbose=False) as batch:
        yield oracle.Target(batch, K, MOST)


def walk(target, every=1000, rejoin=0, prompt=b"Natalia sold clips to 48 of her friends in April, and then"):
    tokens = target.batch.tokenize(prompt)
    return oracle.Walk(target, Anything(), ITEM, Prompt(tuple(tokens), ()), every, 16, rejoin)


def test_an_oracle_that_keeps_nothing_is_exact_decoding(target):
    line = walk(target).run(lambda tokens: False)
    assert line["oracle_steps"] == line["steps"] and line["oracle_tokens"] == line["tokens"] == MOST
    assert line["kept"] == 0 and 0 < len(line["mismatches"]) < line["steps"]
    assert all(one["margin"] is None or one["margin"] > 0 for one in line["mismatches"])


def test_an_oracle_that_keeps_everything_takes_the_fewest_steps(target):
    line = walk(target, every=1).run()
    assert line["kept"] == len(line["mismatches"]) > 0 and all(one["kept"] for one in line["mismatches"])
    assert line["oracle_tokens"] > K * (line["oracle_steps"] - 1), "only control tokens and the end stop a draft"
    measured = [one["m"] for one in line["mismatches"] if one.get("m") is not None]
    assert measured and all(-MOST < m < MOST for m in measured)


def test_walks_side_by_side_are_those_alone(target):
    """Each item stays in its slot, where a head has seen what comes before."""
    walks = [{}, {"prompt": b"Tom has 3 apples and 4 pears. He gives"}]

    def run(more):
        return walk(target, **more).run(lambda tokens: len(tokens) % 2 == 0 or tokens[-1] % 2 == 0)

    alone = [run(more) for more in walks]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, walks)) == alone


def test_a_copy_that_has_rejoined_is_not_finished(target):
    prompt = Prompt(tuple(target.batch.tokenize(b"Tom has 3 apples and 4 pears.")), ())
    made = [one.token for one in target.continued(prompt.tokens, prompt, MOST, oracle.EXACT)]
    whole = target.finished(list(prompt.tokens), prompt, MOST, [], 0)
    assert whole == [*prompt.tokens, *made]
    rest = [*made[:12], *made[:12][::-1]]
    joined = target.finished(list(prompt.tokens), prompt, MOST, rest, 8)[len(prompt.tokens) :]
    assert joined[:8] == made[:8] and joined[-12:] == made[:12][::-1] and len(joined) < MOST


def test_steps_to_a_number_of_tokens():
    records = [SimpleNamespace(round=i) for i in (3, 3, 3, 4, 5, 5)]
    assert [oracle.steps_to(records, n) for n in (0, 3, 4, 5, 6)] == [0.0, 1.0, 2.0, 2.5, 3.0]
    assert oracle.steps_to(records, 1) == pytest.approx(1 / 3)


def test_the_report_has_the_gain_and_m():
    """12 tokens in 6 steps, and in 4 with two kept: 1/2 - 1/3 = m 2/12, so m is 1."""
    counts = {"tokens": 12, "steps": 6, "oracle_tokens": 12, "oracle_steps": 4, "kept": 2, "right": True}
    mismatches = [
        {"at": 1, "margin": 0.2, "kept": True, "m": 1.5},
        {"at": 2, "margin": 5.0, "kept": False},
        {"at": 3, "margin": None, "kept": True, "m": 0.5},
    ]
    lines = [{"item": f"{i}", "group": f"{i}", **counts, "mismatches": mismatches} for i in range(6)]
    page = oracle.report([*lines, {"item": "x", "group": "x", "right": False}])
    assert "6 items that exact decoding answers right, of 7" in page
    for row in (
        "| steps, exact over oracle | 1.50 ",
        "| m by the tokens per step | 1.00 ",
        "| up to 0.3 | 6 | 1.00 [1.00, 1.00] | 6 | 1.50 ",
        "| not known | 6 | 1.00 [1.00, 1.00] | 6 | 0.50 ",
        "| above | 6 | 0.00 [0.00, 0.00] | 0 |  |",
        "| all | 18 |",
    ):
        assert row in page, row
    assert "no item right" in oracle.report([])


def test_a_file_of_other_conditions_is_refused(tmp_path):
    path = tmp_path / "items.jsonl"
    oracle.open_lines(path, {"k": 8})
    oracle.open_lines(path, {"k": 8}).append({"item": "a"})
    assert oracle.open_lines(path, {"k": 8}).rows[1:] == [{"item": "a"}]
    with pytest.raises(DataError, match="k"):
        oracle.open_lines(path, {"k": 5})
