"""HumanEval: complete a Python function from its docstring; judged by running its tests.

Convention: lm-evaluation-harness `humaneval_instruct.yaml` (release 0.4.13): the assistant's answer begins with the
function's head, generation ends at the next top-level statement or at the fence, greedy, pass@1.
"""

from __future__ import annotations

from pyfly_cpp.machine.rows import Row, Where
from pyfly_cpp.measure.tasks.code import CodeTask
from pyfly_cpp.measure.tasks.data_sets import HubSplit
from pyfly_cpp.measure.tasks.task import Item


class HumanEval(CodeTask):
    """Rows: `id`, `prompt`, `entry_point`, `test`; `canonical_solution` is not needed."""

    name = "humaneval"
    title = "HumanEval functions, pass@1"
    max_tokens = 400
    hub = (HubSplit("openai/openai_humaneval", None, "test"),)

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        return {**where.row, "id": where.text("task_id")}

    def parse(self, where: Where) -> Item:
        fields = where.fields("prompt", "entry_point", "test")
        if not fields["entry_point"].isidentifier():
            raise where.error(f"the field 'entry_point' must be a function's name, not {fields['entry_point']!r}.")
        return Item.of(where, fields)

    def question(self, item: Item) -> str:
        return (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{item.fields['prompt']}\n```\n"
        )

    def prefix(self, item: Item) -> str:
        return f"Here is the completed function:\n```python\n{item.fields['prompt']}\n"

    def stop(self, item: Item) -> list[str]:
        return ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "```"]

    def program(self, item: Item, completion: str) -> str:
        fields = item.fields
        return f"{fields['prompt']}{completion}\n{fields['test']}\ncheck({fields['entry_point']})\n"
