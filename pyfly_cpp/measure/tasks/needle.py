"""Needle in a haystack, several values: long noise in which four numbers are hidden under one name; all are asked for.

Generated, so it needs no data file and any length can be had. Form: RULER `niah_multivalue` as in lm-evaluation-harness
(release 0.4.13): its sentences for needle, question and the beginning of the answer; the haystack is RULER's repeated
noise; score: the share of the values that occur in the answer. What loose acceptance risks here is a digit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pyfly_cpp.machine.rows import Where
from pyfly_cpp.measure.tasks.task import Item, Task, Verdict

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ADJECTIVES = (
    "amber", "brisk", "calm", "dusty", "eager", "faint", "gentle", "hollow", "idle", "jolly", "keen", "lively",
    "mellow", "narrow", "old", "pale", "quiet", "rapid",
)  # fmt: skip
_NOUNS = (
    "anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "oar", "pebble",
)  # fmt: skip


class Needle(Task):
    """Rows: `id`, `input` (the whole question), `query` (the name), `outputs` (the values)."""

    name = "needle"
    title = "needle in a haystack with several values, generated (RULER niah_multivalue)"
    max_tokens = 128
    criterion = "all found"

    def generate(self, n_items: int, n_words: int = 800, n_values: int = 4, seed: int = 0) -> list[Item]:
        """`n_items` haystacks of about `n_words` words with `n_values` numbers each; the same for the same
        arguments."""
        if n_items < 1 or n_values < 1:
            raise ValueError(f"needle needs at least one item and one value, not {n_items} and {n_values}.")
        if n_words < 40 * n_values:
            raise ValueError(
                f"needle needs at least {40 * n_values} words to hide {n_values} values in, not {n_words}."
            )
        rng = random.Random(f"{seed}/{n_words}/{n_values}")
        items = []
        for i in range(n_items):
            query = f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"
            values = [str(rng.randint(10**6, 10**7 - 1)) for _ in range(n_values)]
            sentences = [_NOISE] * max(n_values, n_words // len(_NOISE.split()))
            for place, value in zip(sorted(rng.sample(range(len(sentences)), n_values), reverse=True), values):
                sentences.insert(place, f"One of the special magic numbers for {query} is: {value}.")
            text = (
                "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will "
                "quiz you about the numbers afterwards.\n" + "\n".join(sentences) + "\n"
                f"What are all the special magic numbers for {query} mentioned in the provided text?"
            )
            items.append(Item(f"needle-{n_words}-{seed}-{i}", {"input": text, "query": query, "outputs": values}))
        return items

    def parse(self, where: Where) -> Item:
        return Item.of(where, {**where.fields("input", "query"), "outputs": where.texts("outputs")})

    def question(self, item: Item) -> str:
        return str(item.fields["input"])

    def prefix(self, item: Item) -> str:
        return f"The special magic numbers for {item.fields['query']} mentioned in the provided text are"

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: every value occurs. Detail: `recall`, the share that does (RULER's score)."""
        values = item.fields["outputs"]
        found = [value for value in values if value.lower() in text.lower()]
        return Verdict(
            len(found) == len(values), " ".join(found), " ".join(values), {"recall": len(found) / len(values)}
        )
