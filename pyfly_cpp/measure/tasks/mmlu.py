"""MMLU: four-way exam questions of 57 subjects. How it is asked and read: choice.py."""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.machine.rows import Row, Where
from pyfly_cpp.measure.tasks.choice import ChoiceTask
from pyfly_cpp.measure.tasks.data_sets import HubSplit
from pyfly_cpp.measure.tasks.task import Item


class Mmlu(ChoiceTask):
    """Rows: `id`, `subject`, `question`, `choices` (four), `answer`."""

    name = "mmlu"
    title = "MMLU, four choices, reasoned and read from the text"
    n_choices = 4
    max_tokens = 600  # a model of 1.5B weighs all four choices in turn; 300 tokens cut half of its answers
    hub = (HubSplit("cais/mmlu", "all", "test"),)
    hub_examples = HubSplit("cais/mmlu", "all", "dev")

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        answer = where.integer("answer")
        letter = "ABCD"[answer] if 0 <= answer < 4 else str(answer)
        return {**where.row, "id": f"mmlu-{split.split}-{where.line - 1}", "answer": letter}

    def parse(self, where: Where) -> Item:
        return Item.of(where, {**super().parse(where).fields, **where.fields("subject")})

    def kind(self, item: Item) -> str:
        """The item's subject."""
        return str(item.fields["subject"])

    def pick_examples(self, item: Item, examples: Sequence[Item], n: int) -> list[Item]:
        """The first n of the item's own subject, as in the harness; fewer if there are fewer."""
        return [example for example in examples if example.fields["subject"] == item.fields["subject"]][:n]
