"""Every rule on code, maths and stories: what it gains, what it gives away, and what becomes of the answers.

    python benchmarks/fidelity.py record ... --rules all --stages pooled8 rest8 --parts humaneval gsm8k writing \\
        --limit humaneval=30 gsm8k=30 writing=30
    python benchmarks/rules.py --records FOLDER > benchmarks/rules.md

Reads the records of fidelity.py, which can be stopped at any moment and goes on; study/plan.py names the rules. Every
figure is of the items that a rule and exact decoding with as many drafts both have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from resumable import markdown
from study.cells import within
from study.comparing import Answers, Comparison, Pair, base_of
from study.deriving import repeated
from study.flips import first_difference
from study.plan import ALL_RULES, SUPERSEDED, Way, ways
from study.records import Records, loose_of

from pyfly_cpp.decoding import PLAIN
from pyfly_cpp.decoding.gates import regions_of
from pyfly_cpp.evaluation.files import DataError, Row

KINDS = {"code": "humaneval", "math": "gsm8k", "story": "writing"}
"""Kinds of text, and the parts of the study that hold them."""
COMPARED = {"code": "code", "math": "numbers"}
"""Of answers of a kind, what is compared to the letter: a region."""
HEAD = (
    "rule",
    "items",
    "tokens a round",
    "x exact",
    "loose, %",
    "leading tokens, %",
    "same answer, %",
    "same code or numbers, %",
    "right, exact's",
    "tokens, x exact",
    "loops, exact's",
)
LEGEND = """
x exact: tokens a round over those of exact decoding (intervals of 95 %), which is the speed over exact's, too, since
all rounds draft as much. Loose: accepts of 100 tokens. Leading tokens: those before the first that is not as in exact's
answer, of the longer answer's. Same code, same numbers: answers whose code, or numbers, are exact's to the letter,
wherever they stand. Right: the tests pass; the last number is the answer; a story has not fallen into a loop, or apart.
Tokens: of an answer. Loops: answers with a loop in them. `exact #2` is exact decoding once more, with other neighbours
in its batches, and `plain` the same without drafts: the noise. A rule that has fewer than 20 items here is not to be
compared with others."""

N_GRAMS = (4, 6, 8, 12, 16)
REPETITIONS = """## What no-repeat would refuse

Rules without the guard `no-repeat:n`, all draft lengths: answers in which it would have refused a loose accept, and
how many of these are in a loop. A small n changes answers that are in none, a large one misses loops."""


class Table:
    """The rules on one kind of text."""

    def __init__(self, records: Records, answers: Answers, kind: str) -> None:
        self._records = records
        self._answers = answers
        self._kind = kind

    def lines(self, k: int) -> list[list[str]]:
        """Of every rule that has answers with k drafts a round."""
        all_ways = [way for one in ways(ALL_RULES, k) for way in (one, Way(one.setting, 2))] + [Way(PLAIN)]
        found = [(way, self._answers.pairs(way, base_of(way), (KINDS[self._kind],))) for way in all_ways]
        return [self._line(way, pairs) for way, pairs in found if pairs]

    def _line(self, way: Way, pairs: Sequence[Pair]) -> list[str]:
        c = Comparison(pairs)
        part = COMPARED.get(self._kind)
        return [
            way.title,
            str(c.n),
            f"{c.per_round:.2f}",
            "" if way == base_of(way) or way.setting.is_plain else within(c.gain, 1, 2),
            f"{c.loose:.1f}",
            _percent(pairs, n_equal, lambda row, exact: max(len(row["answer"]), len(exact["answer"]))),
            _percent(pairs, lambda row, exact: row["answer"] == exact["answer"]),
            ""
            if part is None
            else _percent(pairs, lambda row, exact: self._text(row, part) == self._text(exact, part)),
            f"{c.right}, {sum(exact['right'] for _, exact in pairs)}",
            f"{c.length / c.base_length:.2f}",
            f"{sum(row['loop'] for row, _ in pairs)}, {sum(exact['loop'] for _, exact in pairs)}",
        ]

    def _text(self, row: Row, part: str) -> bytes:
        """What an answer has of a region."""
        pieces = [self._records.pieces[token] for token in row["answer"]]
        return b"".join(piece for region, piece in zip(regions_of(pieces), pieces) if region == part)


def n_equal(row: Row, exact: Row) -> int:
    """How many leading tokens are exact's."""
    place = first_difference(row["answer"], exact["answer"])
    return len(row["answer"]) if place is None else place


def _percent(
    pairs: Sequence[Pair], of: Callable[[Row, Row], float], to: Callable[[Row, Row], float] = lambda row, exact: 1
) -> str:
    n = sum(to(*pair) for pair in pairs)
    return f"{100 * sum(of(*pair) for pair in pairs) / n:.0f}" if n else ""


def page(records: Records, k: int) -> str:
    """All of it, in Markdown; raises DataError where nothing is recorded."""
    answers = Answers(records, takes_all=True)
    sections = []
    for kind in KINDS:
        lines = Table(records, answers, kind).lines(k)
        if lines:
            sections.append(f"## {kind}\n\n{markdown(HEAD, lines)}")
    if not sections:
        raise DataError(f"{records.folder} has no answers with {k} drafts a round to {', '.join(KINDS.values())}.")
    head = (
        f"# Rules compared\n\nMade by `rules.py`: greedy, {k} drafts a round, no governor. {records.about}.\n{LEGEND}"
    )
    return "\n\n".join(text for text in [head, *sections, repetitions(answers)] if text)


def repetitions(answers: Answers) -> str:
    """What `no-repeat` would refuse of rules without it, for several n: why it has the n that it has. Empty where these
    rules have no answers."""
    rows = []
    for rule in SUPERSEDED:
        for part in answers.parts:
            made = [row for way in answers.ways if way.rule == rule for row in answers.of(way, (part,))]
            if made:
                loops = [row for row in made if row["loop"]]
                accepts = sum(len(row["loose"]) for row in made)
                refused = [f"{_n_refused(made, n)}, {_n_refused(loops, n)}" for n in N_GRAMS]
                rows.append([f"`{rule}`", part, str(len(made)), str(len(loops)), str(accepts), *refused])
    head = ["rule", "part", "answers", "in a loop", "loose accepts", *(f"n = {n}" for n in N_GRAMS)]
    return f"{REPETITIONS}\n\n{markdown(head, rows)}" if rows else ""


def _n_refused(rows: Sequence[Row], n: int) -> int:
    """In how many answers one of the loose accepts repeats n tokens."""
    return sum(any(repeated(row["answer"], entry["place"]) >= n for entry in loose_of(row)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True, help="folder that fidelity.py record has written")
    parser.add_argument("--k", type=int, default=8, help="drafts in a round (default 8)")
    args = parser.parse_args()
    try:
        print(page(Records(args.records), args.k))
    except DataError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
