"""Reading answers: gold answers, awkward outputs written for the purpose, and the harness itself where it is
installed."""

from __future__ import annotations

import json

import pytest

from pyfly_cpp.measure.tasks import extraction
from pyfly_cpp.measure.tasks.registry import get_task
from pyfly_cpp.measure.tasks.task import Item

# output, what strict-match reads, what flexible-extract reads (both normalised; "" if nothing)
AWKWARD = [
    ("#### 18", "18", "18"),
    ("She sells 9 eggs.\n#### 18", "18", "18"),
    ("#### 1,234", "1234", "1234"),
    ("#### $18", "", "18"),
    ("#### 18.", "18", "18"),
    ("#### 18.00", "18.00", "18.00"),
    ("#### -5", "-5", "-5"),
    ("####18", "", "18"),
    ("####  18", "", "18"),
    ("#### 18 dollars", "18", "18"),
    ("#### 18\n#### 20", "18", "20"),
    ("The answer is 18.", "", "18"),
    ("The answer is $18.", "", "18"),
    ("The answer is **18**.", "", "18"),
    ("So \\boxed{18}.", "", "18"),
    ("It costs $1,234.50 in total.", "", "1234.50"),
    ("18 eggs, sold on 3 days", "", "3"),
    ("no number at all", "", ""),
    ("", "", ""),
    ("eighteen", "", ""),
    ("#### eighteen (18)", "", "18"),
    ("3 + 4 = 7\n#### 7\n\nLet me check: 3 + 4 = 7", "7", "7"),
    ("#### 7\nQuestion", "7", "7"),
    ("<<9*2=18>>18", "", "18"),
    ("Half of it, 50%, is 9", "", "9"),
    ("It is 3/4 of 12", "", "12"),
    ("x = 12...", "", "12.."),
    ("The total is 1 000", "", "000"),
    ("Between 10-15 people", "", "-15"),
    ("#### 5\n.. and that is it..", "5", "."),
    ("The price is $ 5", "", "5"),
    ("Answer: ７", "", ""),  # a full-width digit
    ("#### 0", "0", "0"),
]


@pytest.mark.parametrize(("text", "strict", "flexible"), AWKWARD)
def test_awkward_outputs(text, strict, flexible):
    assert extraction.strict_number(text) == strict
    assert extraction.flexible_number(text) == flexible


@pytest.mark.parametrize("text", [text for text, _, _ in AWKWARD])
def test_the_harness_reads_the_same(text):
    pytest.importorskip("lm_eval")
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    ignored = [",", r"\$", r"(?s).*#### ", r"\.$"]
    task = get_task("gsm8k")
    for expected in ("18", "7", "1234", "5", "0", "-15", "000"):
        verdict = task.score(Item("x", {"question": "q", "answer_number": expected}), text, [])
        for regex, group, mine in (
            (r"#### (\-?[0-9\.\,]+)", 0, verdict.detail["strict"]),
            (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1, verdict.correct),
        ):
            read = next(iter(RegexFilter(regex, group_select=group).apply([[text]], [{}])))
            theirs = exact_match_hf_evaluate(read, [f"work\n#### {expected}"], ignored, ignore_case=True)
            assert bool(theirs["exact_match"]) == mine, (text, expected, regex)


def test_gold_answers(data):
    task = get_task("gsm8k")
    rows = [json.loads(line) for line in (data / "gsm8k_sample.jsonl").read_text(encoding="utf-8").splitlines()]
    for item, row in zip(task.read(data / "gsm8k_sample.jsonl"), rows):
        verdict = task.score(item, row["answer"], [])
        assert verdict.correct and verdict.detail["strict"], row["id"]
        wrong = task.score(item, row["answer"] + "1", [])
        assert not wrong.correct and not wrong.detail["strict"], row["id"]


def test_equal_as_numbers_is_reported_beside():
    task = get_task("gsm8k")
    verdict = task.score(Item("x", {"question": "q", "answer_number": "18"}), "#### 18.00", [])
    assert not verdict.correct and verdict.detail == {"strict": False, "value": True}


@pytest.mark.parametrize(
    ("language", "text", "strict", "flexible"),
    [
        ("de", "Die Antwort lautet 1.000.", True, True),
        ("de", "Es sind 1000", False, True),
        ("fr", "La réponse est 1000", True, True),
        ("fr", "La réponse est 1 000", False, False),
        ("th", "คำตอบคือ 1,000", True, True),
        ("th", "คำตอบคือ ๑๐๐๐", False, False),
    ],
)
def test_mgsm_languages(language, text, strict, flexible):
    item = Item("x", {"language": language, "question": "q", "answer_number": "1000"})
    verdict = get_task("mgsm").score(item, text, [])
    assert (verdict.detail["strict"], verdict.correct) == (strict, flexible)


CHOICES = ["a dog", "the old dog", "a cat", "none"]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" B.", "B"),
        ("(B) the old dog", "B"),
        ("**C**", "C"),
        ("The answer is (C).", "C"),
        ("The answer is C because A dog barks.", "C"),
        ("First I thought the answer is A. But the correct answer is D.", "D"),
        ("The answer is: **D**", "D"),
        ("Answer: C", "C"),
        ("Let's weigh (A) and (D). The answer is option B.", "B"),
        ("(A) is young. (D) is none.\nThe answer is \\(\\boxed{B}\\).", "B"),
        ("(A) is young, so $\\boxed{\\text{B}}$. (D) is none.", "B"),
        ("The answer is $\\boxed{\\text{B. the old dog}}$", "B"),
        ("The answer would be (B). Option (A) is wrong.", "B"),
        ("Option B is the correct answer because (A) and (C) fail.", "B"),
        ("Option A is not the answer, but (C).", "C"),
        ("Neither A nor B is the answer. It is (C).", "C"),
        ("I do not think B is the correct answer; (C) fits.", "C"),
        ("A is the option that I first considered, but (D).", "D"),
        ("So **B** is the best choice.", "B"),
        ("The answer is the letter C", "C"),
        ("The answer is option a cat", "C"),
        ("Let us see. (A) is wrong, so (B)", "B"),
        ("(A) is too far, (B) is closed.\nThe answer is (C).", "C"),
        ("(A) is too far, (B) is closed, so it is (C).", "C"),
        ("A: Let's think step by step. Dogs bark. The answer is (C).", "C"),
        ("A: Let's think step by step. Dogs bark.", ""),
        ("(A) a dog\n(B) the old dog\n\nIt barks and is old: (B)", "B"),
        ("A", "A"),
        ("D\n\nThis is because (A) barks.", "D"),
        ("B. The dog is old.", "B"),
        ("B. the old dog\n\n(A) is wrong because it is young.", "B"),
        ("A\nB\nC\nD\nIt is (C)", "C"),
        ("A. a dog\nB. the old dog\nC. a cat\nD. none\n\nSo I choose: C", "C"),
        ("A. a dog\nB. the old dog\nC. a cat\nD. none", ""),
        ("A. a dog\nB. the old dog", ""),
        ("B. the old dog\nB. the old dog\nB.", "B"),
        ("**A.** a dog\n**B.** the old dog\n**C.** a cat\n\nIt purrs, so a cat.", "C"),
        ("(A) a dog\n(B) the old dog\n(C) a cat\n(D) none", ""),
        ("(A) is too young.\n(B) is closed.\n(C) fits.", "C"),
        ("B. It is old. Note: A cat is not", "B"),
        ("The answer is 'C'.", "C"),
        ("The answer is ‘C’.", "C"),
        ("The answer is “C”.", "C"),
        ("The answer is A's neighbour.", ""),
        ("The answer is A’s neighbour.", ""),
        ("The answer is A or B.", ""),
        ("The answer is A or a cat", "A"),
        ("The correct answer isn't (A).", ""),
        ("The correct answer is not (A), but (C).", "C"),
        ("B) the old dog.", "B"),
        ("B: the old dog", "B"),
        ("It must be the old dog", "B"),
        ("A dog is what it is", "A"),
        ("I do not know", ""),
        ("E", ""),
        ("", ""),
    ],
)
def test_choice_letters(text, letter):
    assert extraction.choice_letter(text, CHOICES) == letter


def test_code_ends_at_the_fence():
    assert extraction.until_fence("    return 1\n```\nThis returns 1.") == "    return 1\n"
    assert extraction.until_fence("    return 1") == "    return 1"
