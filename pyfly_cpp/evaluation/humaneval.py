"""HumanEval: complete a Python function from its docstring; judged by running its tests (in the sandbox).

Convention: lm-evaluation-harness `humaneval_instruct.yaml` (release 0.4.13): the assistant's answer begins with the
function's head, generation ends at the next top-level statement or at the fence, greedy, pass@1.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.evaluation import extraction
from pyfly_cpp.evaluation.files import Row
from pyfly_cpp.evaluation.hub import HubSplit
from pyfly_cpp.evaluation.sandbox import Limits, run_program
from pyfly_cpp.evaluation.task import Item, Task, Verdict, Where


class HumanEval(Task):
    """Rows: `id`, `prompt`, `entry_point`, `test`; `canonical_solution` is not needed."""

    name = "humaneval"
    title = "HumanEval functions, pass@1"
    max_tokens = 400
    runs_code = True
    criterion = "passed"
    hub = (HubSplit("openai/openai_humaneval", None, "test"),)

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        self.limits = limits

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        """See Task."""
        return {**where.row, "id": where.text("task_id")}

    def parse(self, where: Where) -> Item:
        """See Task."""
        entry_point = where.text("entry_point")
        if not entry_point.isidentifier():
            raise where.error(f"the field 'entry_point' must be a function's name, not {entry_point!r}.")
        fields = {"prompt": where.text("prompt"), "entry_point": entry_point, "test": where.text("test")}
        return Item(where.text("id"), fields)

    def question(self, item: Item) -> str:
        """See Task."""
        return (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{item.fields['prompt']}\n```\n"
        )

    def prefix(self, item: Item) -> str:
        """See Task."""
        return f"Here is the completed function:\n```python\n{item.fields['prompt']}\n"

    def stop(self, item: Item) -> list[str]:
        """See Task."""
        return ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "```"]

    def program(self, item: Item, completion: str) -> str:
        """The program whose end without an exception is a pass."""
        fields = item.fields
        return f"{fields['prompt']}{completion}\n{fields['test']}\ncheck({fields['entry_point']})\n"

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: all tests pass. Detail: `status` and `reason` of the sandbox."""
        code = extraction.until_fence(text)
        outcome = run_program(self.program(item, code), self.limits)
        return Verdict(outcome.passed, code, "passes its tests", {"status": outcome.status, "reason": outcome.detail})
