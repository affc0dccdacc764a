"""Open-ended writing: there is no right answer, but an output can fall into a loop or apart. That is what is counted.

It does not judge taste; a text that passes here can still be dull.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.engine.repetition import breakdown, find_loop
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
        """Correct: no breakdown (see engine/repetition.py). Detail: `loop`, and the loop's `period` if there is one."""
        reason = breakdown(text, tokens)
        loop = find_loop(tokens)
        detail = {"loop": loop is not None, "period": loop.period if loop else None}
        return Verdict(reason == "", reason, "", detail)
