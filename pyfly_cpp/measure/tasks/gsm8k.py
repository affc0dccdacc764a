"""GSM8K: grade-school word problems with a number as the answer.

Convention: lm-evaluation-harness `gsm8k.yaml` (release 0.4.13): `Question: ...\\nAnswer:`, five worked examples,
`flexible-extract` (the last number) and `strict-match` (after `#### `). Without examples a sentence asks for the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyfly_cpp.machine.rows import Row, Where
from pyfly_cpp.measure.tasks import extraction
from pyfly_cpp.measure.tasks.data_sets import HubSplit
from pyfly_cpp.measure.tasks.task import Item, Task, Verdict


class Gsm8k(Task):
    """Rows: `id`, `question`, `answer_number`; worked examples also `answer`. Or as they are published: `question`, and
    `answer`, which ends with `####` and the number."""

    name = "gsm8k"
    title = "GSM8K word problems, last number (strict: after ####)"
    max_tokens = 400
    few_shot = 5
    hub = (HubSplit("openai/gsm8k", "main", "test"),)
    hub_examples = HubSplit("openai/gsm8k", "main", "train")

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        return self._numbered(where, f"gsm8k-{split.split}")

    def _numbered(self, where: Where, ids: str) -> Row:
        number = where.text("answer").rpartition("####")[2].strip().replace(",", "")
        return {"id": f"{ids}-{where.line - 1}", **where.row, "answer_number": number}

    def parse(self, where: Where) -> Item:
        if "answer_number" not in where.row and "####" in str(where.row.get("answer", "")):
            where = replace(where, row=self._numbered(where, "gsm8k"))
        return Item.of(where, where.fields("question", "answer_number", optional=["answer"]))

    def question(self, item: Item) -> str:
        return f"Question: {item.fields['question']}\nAnswer:"

    def messages(self, item: Item, examples: Sequence[Item] = ()) -> list[dict[str, str]]:
        messages = super().messages(item, examples)
        if not examples:
            form = "Think step by step, then write the answer on a line of its own as #### and the number."
            messages[-1] = {"role": "user", "content": f"{item.fields['question']}\n{form}"}
        return messages

    def worked_answer(self, item: Item) -> str:
        if "answer" not in item.fields:
            return super().worked_answer(item)
        return str(item.fields["answer"])

    def stop(self, item: Item) -> list[str]:
        return ["Question:", "</s>", "<|im_end|>"]

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: the last number is the answer. Detail: `strict`, and `value` (equal as numbers: 18.00 is 18)."""
        expected = extraction.normalise_number(item.fields["answer_number"])
        flexible, strict = extraction.flexible_number(text), extraction.strict_number(text)
        return Verdict(
            extraction.same_number(flexible, expected), flexible, expected,
            {"strict": extraction.same_number(strict, expected), "value": extraction.same_value(flexible, expected)},
        )  # fmt: skip
