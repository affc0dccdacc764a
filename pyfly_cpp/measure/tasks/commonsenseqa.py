"""CommonsenseQA: five-way questions of everyday knowledge. How it is asked and read: choice.py."""

from __future__ import annotations

from pyfly_cpp.machine.rows import Row, Where
from pyfly_cpp.measure.tasks.choice import ChoiceTask
from pyfly_cpp.measure.tasks.data_sets import HubSplit


class CommonsenseQa(ChoiceTask):
    """Rows: `id`, `question`, `choices` (five), `answer`."""

    name = "commonsenseqa"
    title = "CommonsenseQA, five choices, reasoned and read from the text"
    n_choices = 5
    hub = (HubSplit("tau/commonsense_qa", None, "validation"),)
    hub_examples = HubSplit("tau/commonsense_qa", None, "train")

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        choices = where.row.get("choices")
        if not isinstance(choices, dict) or list(choices.get("label", ())) != list("ABCDE"):
            raise where.error("the field 'choices' must have the labels A to E and their texts.")
        row = {"id": f"csqa-{split.split}-{where.text('id')}", "question": where.text("question")}
        return {**row, "choices": list(choices.get("text", ())), "answer": where.text("answerKey")}
