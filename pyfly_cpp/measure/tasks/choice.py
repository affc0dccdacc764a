"""Common parts of the multiple-choice tasks: reason, then name a letter.

lm-evaluation-harness scores them by the log-likelihood of the letters by default, which no drafting touches. Here the
model writes its reasoning and the letter is read from it, as in the harness's generative forms
(`mmlu/flan_cot_zeroshot`, release 0.4.13: `(A) ... (B) ...`, "Let's think step by step."), so that what loose
acceptance does to reasoning can be seen. Worked examples have no reasoning; with them the model answers immediately.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyfly_cpp.machine.rows import Where
from pyfly_cpp.measure.tasks import extraction
from pyfly_cpp.measure.tasks.task import Item, Task, Verdict


class ChoiceTask(Task):
    """Rows: `id`, `question`, `choices` (texts of A, B, ...), `answer` (a letter)."""

    n_choices: int
    max_tokens = 300
    few_shot = 5

    def parse(self, where: Where) -> Item:
        fields = {**where.fields("question", "answer"), "choices": where.texts("choices")}
        choices, answer = fields["choices"], fields["answer"]
        if len(choices) != self.n_choices:
            raise where.error(f"the field 'choices' must have {self.n_choices} texts, not {len(choices)}.")
        letters = [chr(ord("A") + i) for i in range(len(choices))]
        if answer not in letters:
            raise where.error(f"the field 'answer' must be a letter of {letters[0]}..{letters[-1]}, not {answer!r}.")
        return Item.of(where, fields)

    def question(self, item: Item) -> str:
        choices = " ".join(f"({chr(ord('A') + i)}) {text}" for i, text in enumerate(item.fields["choices"]))
        return f"Q: {item.fields['question'].strip()}\n{choices}"

    def messages(self, item: Item, examples: Sequence[Item] = ()) -> list[dict[str, str]]:
        messages = super().messages(item, examples)
        if not examples:
            messages[-1]["content"] += "\nThink step by step, then end with: The answer is (X)."
        return messages

    def worked_answer(self, item: Item) -> str:
        return f"The answer is ({item.fields['answer']})."

    def stop(self, item: Item) -> list[str]:
        return ["</s>", "Q:", "<|im_end|>"]

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: the letter that the output names is the answer."""
        letter = extraction.choice_letter(text, item.fields["choices"])
        return Verdict(letter == item.fields["answer"], letter, item.fields["answer"], {"answered": letter != ""})
