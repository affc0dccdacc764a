"""Open-ended writing: there is no right answer, but an output can fall into a loop or apart. That is what is counted.

It does not judge taste; a text that passes here can still be dull.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from pyfly_cpp.engine.repetition import find_loop
from pyfly_cpp.machine.rows import Where
from pyfly_cpp.measure.tasks.task import Item, Task, Verdict


class Writing(Task):
    """Rows: `id`, `prompt`; rows with one `prompt_id` (if there) are one prompt in several forms."""

    name = "writing"
    title = "open-ended writing: neither in a loop nor broken down"
    max_tokens = 300
    criterion = "intact"

    def parse(self, where: Where) -> Item:
        return Item.of(where, where.fields("prompt"), group="prompt_id")

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: no `breakdown`. Detail: `loop`, and the loop's `period` if there is one."""
        reason = breakdown(text, tokens)
        loop = find_loop(tokens)
        detail = {"loop": loop is not None, "period": loop.period if loop else None}
        return Verdict(reason == "", reason, "", detail)


def breakdown(text: str, tokens: Sequence[int]) -> str:
    """Why an open-ended output is no usable text; empty if it is one.

    `"loop"`: a true loop; `"empty"`: fewer than 5 words; `"garbage"`: over 5% of the characters are replacement or
    control characters; `"repetitive"`: of at least 100 words, under half of the 4-word sequences are distinct.
    """
    if find_loop(tokens) is not None:
        return "loop"
    words = re.findall(r"\w+", text.lower())
    if len(words) < 5:
        return "empty"
    bad = sum(1 for char in text if char == "\ufffd" or (ord(char) < 32 and char not in "\n\t\r"))
    if bad > 0.05 * len(text):
        return "garbage"
    grams = Counter(zip(words, words[1:], words[2:], words[3:]))
    if len(words) >= 100 and len(grams) < 0.5 * sum(grams.values()):
        return "repetitive"
    return ""
