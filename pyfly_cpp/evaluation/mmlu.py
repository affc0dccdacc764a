"""MMLU: four-way exam questions of 57 subjects. How it is asked and read: choice.py."""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.evaluation.choice import ChoiceTask
from pyfly_cpp.evaluation.task import Item, Where


class Mmlu(ChoiceTask):
    """Rows: `id`, `subject`, `question`, `choices` (four), `answer`."""

    name = "mmlu"
    title = "MMLU, four choices, reasoned and read from the text"
    n_choices = 4

    def parse(self, where: Where) -> Item:
        """See Task."""
        item = super().parse(where)
        return Item(item.id, {**item.fields, "subject": where.text("subject")})

    def kind(self, item: Item) -> str:
        """Its subject."""
        return str(item.fields["subject"])

    def pick_examples(self, item: Item, examples: Sequence[Item], n: int) -> list[Item]:
        """The first n of the item's own subject, as in the harness; fewer if there are fewer."""
        return [example for example in examples if example.fields["subject"] == item.fields["subject"]][:n]
