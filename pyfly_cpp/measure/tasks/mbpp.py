"""MBPP (sanitized): a Python function from a sentence and its tests; judged by running them.

Convention: lm-evaluation-harness `mbpp_instruct.yaml` (release 0.4.13): the tests are shown, the answer begins inside a
code block, three worked examples (task ids 2, 3, 4 of the `prompt` split), greedy, pass@1.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.machine.rows import Row, Where
from pyfly_cpp.measure.tasks.code import CodeTask
from pyfly_cpp.measure.tasks.data_sets import HubSplit
from pyfly_cpp.measure.tasks.task import Item


class Mbpp(CodeTask):
    """Rows: `id`, `prompt`, `test_list`, `test_imports`; worked examples also `code` (`original_split` is used if
    there)."""

    name = "mbpp"
    title = "MBPP (sanitized) functions, pass@1"
    max_tokens = 256
    few_shot = 3
    hub = (HubSplit("google-research-datasets/mbpp", "sanitized", "test"),)
    hub_examples = HubSplit("google-research-datasets/mbpp", "sanitized", "prompt")

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        return {**where.row, "id": f"mbpp-{where.integer('task_id')}", "original_split": split.split}

    def parse(self, where: Where) -> Item:
        tests = {"test_list": where.texts("test_list"), "test_imports": where.texts("test_imports", empty=True)}
        return Item.of(where, {**where.fields("prompt", optional=["code", "original_split"]), **tests})

    def question(self, item: Item) -> str:
        tests = "\n".join(item.fields["test_list"])
        return (
            f"You are an expert Python programmer, and here is your task:\n{item.fields['prompt']}\n"
            f"Your code should pass these tests:\n{tests}"
        )

    def worked_answer(self, item: Item) -> str:
        if "code" not in item.fields:
            return super().worked_answer(item)
        return f"```python\n{item.fields['code']}\n```"

    def pick_examples(self, item: Item, examples: Sequence[Item], n: int) -> list[Item]:
        """The first n of the `prompt` split, or of all if no row names its split."""
        prompts = [example for example in examples if example.fields.get("original_split") == "prompt"]
        return list((prompts or examples)[:n])

    def prefix(self, item: Item) -> str:
        return "```python\n"

    def stop(self, item: Item) -> list[str]:
        return ["```"]

    def program(self, item: Item, completion: str) -> str:
        return "\n".join([*item.fields["test_imports"], completion, *item.fields["test_list"], ""])
