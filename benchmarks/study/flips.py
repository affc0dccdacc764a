"""Where an answer parts from the exact one, what was accepted there, and whether it harmed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyfly_cpp.evaluation.files import Row
from study.comparing import Answers, Pair
from study.records import loose_of

CLASSES = ("number", "operator", "format", "name", "connective", "word")
"""What a token is, the first that applies; of two tokens that stand for each other, the first of either's."""

_CONNECTIVES = frozenset(
    re.findall(
        r"\w+",
        """
    a an and are as at because be but by can could did do does each either finally first for from had has have he her
    his how i if in into is it its let many may more much must need needs next no nor not now of on once only or our out
    over per she should since so some such than that the their them then there therefore these they this those thus to
    up was we were what when where which while who will with would yet you your""",
    )
)


def classify(text: str) -> str:
    """What a token is, of CLASSES. A name is a capitalised word or an identifier; a connective is a function word."""
    word = text.strip()
    if re.search(r"\d", word):
        return "number"
    if word.strip("*#_`|-") == "" and word not in ("*", "-"):
        return "format"
    if re.search(r"[+*/=<>%^×÷−$€£]", word) or word == "-":
        return "operator"
    if not re.search(r"\w", word):
        return "format"
    if word.lower() in _CONNECTIVES:
        return "connective"
    if re.match(r"[^\W\d_]*[A-Z_]", word):
        return "name"
    return "word"


@dataclass(frozen=True)
class Parting:
    """The first token at which two answers differ."""

    part: str
    item: str
    kind: str
    """`"harmful"` (right before, wrong here), `"helpful"` (the other way round), `"neither"`."""
    place: int
    """In the answer, tokens, from 0."""
    is_loose: bool
    """Whether a loose accept is what differs; else it is the noise of kernels, or the end of one of them."""
    token: str
    instead_of: str
    """What exact decoding has there."""
    margin: float
    """ln p(choice) - ln p(token), nats; NaN where not loose."""
    entropy: float
    most_rank: int
    """The token's rank among the target's, at most: what is left of probability has no room for more; 0: unknown."""
    before: str
    after: str
    """What the window saw: the next tokens."""

    @property
    def what(self) -> str:
        """Of CLASSES."""
        return min((classify(self.token), classify(self.instead_of)), key=CLASSES.index)


def partings(answers: Answers, pairs: Sequence[Pair], n_before: int = 12, n_after: int = 6) -> list[Parting]:
    """Of all pairs whose answers differ."""
    found = []
    for row, base in pairs:
        place = first_difference(row["answer"], base["answer"])
        if place is None:
            continue
        loose = next((entry for entry in loose_of(row) if entry["place"] == place), None)
        kind = "neither"
        if row["right"] != base["right"]:
            kind = "helpful" if row["right"] else "harmful"
        margin, entropy, p = ((loose or {}).get(name) for name in ("margin", "entropy", "p"))
        found.append(
            Parting(
                row["part"], row["item"], kind, place, loose is not None,
                answers.text(row["answer"][place : place + 1]), answers.text(base["answer"][place : place + 1]),
                math.nan if margin is None else margin, math.nan if entropy is None else entropy, most_rank(margin, p),
                answers.text(row["answer"][max(0, place - n_before) : place]),
                answers.text(row["answer"][place + 1 : place + 1 + n_after]),
            )
        )  # fmt: skip
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which two answers differ, the end of one included; None where they are the same."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def most_rank(margin: float | None, p: float | None) -> int:
    """The rank that a token of probability p has at most, where the most probable one has p e^margin; 0: unknown."""
    if margin is None or not p:
        return 0
    return 2 + max(0, math.floor((1 - p * math.exp(margin) - p) / p + 1e-9))


def count_classes(answers: Answers, rows: Sequence[Row]) -> dict[str, int]:
    """All loose accepts of answers, by what they are."""
    counts = dict.fromkeys(CLASSES, 0)
    for row in rows:
        for entry in loose_of(row):
            kinds = (classify(answers.text([entry[name]])) for name in ("token", "choice"))
            counts[min(kinds, key=CLASSES.index)] += 1
    return counts
