"""MBPP (sanitized): a Python function from a sentence and its tests; judged by running them (in the sandbox).

Convention: lm-evaluation-harness `mbpp_instruct.yaml` (release 0.4.13): the tests are shown, the answer begins inside a
code block, three worked examples (task ids 2, 3, 4 of the `prompt` split), greedy, pass@1.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.evaluation import extraction
from pyfly_cpp.evaluation.files import Row
from pyfly_cpp.evaluation.hub import HubSplit
from pyfly_cpp.evaluation.sandbox import Limits, run_program
from pyfly_cpp.evaluation.task import Item, Task, Verdict, Where


class Mbpp(Task):
    """Rows: `id`, `prompt`, `test_list`, `test_imports`; worked examples also `code` (`original_split` is used if
    there)."""

    name = "mbpp"
    title = "MBPP (sanitized) functions, pass@1"
    max_tokens = 256
    few_shot = 3
    runs_code = True
    criterion = "passed"
    hub = (HubSplit("google-research-datasets/mbpp", "sanitized", "test"),)
    hub_examples = HubSplit("google-research-datasets/mbpp", "sanitized", "prompt")

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        self.limits = limits

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        """See Task."""
        return {**where.row, "id": f"mbpp-{where.integer('task_id')}", "original_split": split.split}

    def parse(self, where: Where) -> Item:
        """See Task."""
        fields: dict[str, object] = {
            "prompt": where.text("prompt"),
            "test_list": where.texts("test_list"),
            "test_imports": where.texts("test_imports", empty=True),
        }
        for name in ("code", "original_split"):
            if name in where.row:
                fields[name] = where.text(name)
        return Item(where.text("id"), fields)

    def question(self, item: Item) -> str:
        """See Task."""
        tests = "\n".join(item.fields["test_list"])
        return (
            f"You are an expert Python programmer, and here is your task:\n{item.fields['prompt']}\n"
            f"Your code should pass these tests:\n{tests}"
        )

    def worked_answer(self, item: Item) -> str:
        """See Task."""
        if "code" not in item.fields:
            return super().worked_answer(item)
        return f"```python\n{item.fields['code']}\n```"

    def pick_examples(self, item: Item, examples: Sequence[Item], n: int) -> list[Item]:
        """The first n of the `prompt` split, or of all where no row names its split."""
        prompts = [example for example in examples if example.fields.get("original_split") == "prompt"]
        return list((prompts or examples)[:n])

    def prefix(self, item: Item) -> str:
        """See Task."""
        return "```python\n"

    def stop(self, item: Item) -> list[str]:
        """See Task."""
        return ["```"]

    def program(self, item: Item, code: str) -> str:
        """The program whose end without an exception is a pass."""
        return "\n".join([*item.fields["test_imports"], code, *item.fields["test_list"], ""])

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: all tests pass. Detail: `status` and `reason` of the sandbox."""
        code = extraction.until_fence(text)
        outcome = run_program(self.program(item, code), self.limits)
        return Verdict(outcome.passed, code, "passes its tests", {"status": outcome.status, "reason": outcome.detail})
