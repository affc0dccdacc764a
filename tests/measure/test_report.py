"""The table, from lines made by hand."""

from __future__ import annotations

import json

import pytest

from pyfly_cpp.measure import report
from pyfly_cpp.measure.quality import summarise


def line(item, setting, correct, tokens=100, seconds=1.0, group=None, **more):
    stats = {"committed": tokens, "rounds": tokens // 4, "loose_accepted": 10 if "margin" in setting else 0}
    return {
        "item": item, "setting": setting, "group": group or item, "correct": correct,
        "detail": {"strict": correct, "status": "x"},
        "finish": "length" if more.get("cut") else "eog",
        "loop": False, "decode_tokens": tokens, "decode_seconds": seconds, "stats": stats,
        "output": more.get("output", setting if more.get("own") else "same"),
        "tokens": list(range(tokens)),
    }  # fmt: skip


SETTINGS = ["plain", "exact", "margin:0.3"]


def lines():
    out = []
    for i in range(20):
        out.append(line(f"{i}", "plain", i < 12, seconds=2.0))
        out.append(line(f"{i}", "exact", i < 12, seconds=1.0))
        out.append(line(f"{i}", "margin:0.3", 2 <= i < 13, seconds=0.5, own=i % 2))
    return out


def test_numbers():
    table = summarise(lines(), SETTINGS, 20, "A task")
    plain, exact, loose = table.rows
    assert (plain.n_correct, exact.n_correct, loose.n_correct) == (12, 12, 11)
    assert (loose.flips.harmful, loose.flips.helpful, loose.flips.both_right) == (2, 1, 10)
    assert loose.recovery.estimate == pytest.approx(11 / 12) and exact.recovery is None
    assert loose.difference.estimate == pytest.approx(-0.05)
    assert (
        loose.tokens_per_second.estimate == 200
        and loose.speedup_plain.estimate == 4
        and loose.speedup_exact.estimate == 2
    )
    assert plain.speedup_exact is None and plain.speedup_plain is None
    assert loose.mean_accepted == 4 and loose.loose_rate == 0.1 and loose.same_output == 0.5
    assert loose.also == {"strict": 11 / 20}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cut": True}, "cut at the limit of tokens, of 1: plain 1, exact 0"),
        ({"own": True}, "plain and exact differ in 1 of 1 answers"),
        ({"output": " \n"}, "Every answer of plain is empty"),
        ({}, None),
    ],
    ids=["cut", "other", "empty", "none"],
)
def test_what_is_odd_in_answers_is_noted(changes, said):
    one = [line("1", name, True, **(changes if name == "plain" else {})) for name in SETTINGS]
    notes = report.task_notes(summarise(one, SETTINGS, 1, "A task"))
    assert any(said in note for note in notes) if said else not any("answers" in note for note in notes), notes


def test_without_plain_nothing_is_compared_with_it():
    some = [row for row in lines() if row["setting"] != "plain"]
    head, body = report.task_cells(summarise(some, SETTINGS[1:], 20))
    assert "x exact [95% CI]" in head and not any("plain" in name for name in head)
    assert all(len(row) == len(head) for row in body)


def test_the_short_table_is_a_part_of_the_whole():
    table = summarise(lines(), SETTINGS, 20)
    (head, body), (short, rows) = report.task_cells(table), report.short_task_cells(table)
    places = [head.index(name) for name in short]
    assert 4 <= len(short) < len(head) and rows == [[row[i] for i in places] for row in body]
    assert {"setting", "correct", "harmful / helpful", "x exact [95% CI]"} <= {*short}


def test_only_complete_items_count():
    partial = lines()[:-1]
    table = summarise(partial, SETTINGS, 25)
    assert (table.n_complete, table.rows[0].n) == (19, 19)
    assert any("19 of 25 items are complete" in note for note in report.task_notes(table))


def test_nothing_yet():
    table = summarise([], SETTINGS, 5)
    assert table.n_complete == 0 and json.dumps(table.as_dict(), allow_nan=False)
    assert report.task_page(table)


def test_groups_widen_the_interval():
    alone = summarise(lines(), SETTINGS, 20).rows[1].accuracy
    grouped_lines = [{**row, "group": str(int(row["item"]) // 3)} for row in lines()]
    table = summarise(grouped_lines, SETTINGS, 20)
    grouped = table.rows[1].accuracy
    assert grouped.high - grouped.low > alone.high - alone.low
    assert any("forms of 7 prompts" in note for note in report.task_notes(table))


@pytest.mark.parametrize("correct", [True, False])
def test_groups_that_are_all_right_or_wrong_leave_room(correct):
    some = [line(f"{i}", name, correct, group=str(i // 3)) for i in range(30) for name in SETTINGS]
    accuracy = summarise(some, SETTINGS, 30).rows[1].accuracy
    assert accuracy.high - accuracy.low == pytest.approx(0.278, abs=0.001), "Wilson's of ten"


def test_markdown_and_json():
    table = summarise(lines(), SETTINGS, 20, "A task")
    page = report.task_page(table, ["a fact"])
    rows = [row for row in page.splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1 and len(rows) == 5
    assert "- a fact" in page and "McNemar p = 1" in page
    assert json.dumps(table.as_dict(), allow_nan=False)
