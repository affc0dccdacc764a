"""MGSM: GSM8K problems in other languages (here German, French and Thai), reasoned in that language.

Convention: lm-evaluation-harness `mgsm/native_cot` (release 0.4.13): the language's words for question and step-by-step
answer, `flexible-extract` (the last number) and `strict-match` (after the language's "the answer is"), punctuation
ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyfly_cpp.machine.rows import Row, Where
from pyfly_cpp.measure.tasks import extraction
from pyfly_cpp.measure.tasks.data_sets import HubSplit
from pyfly_cpp.measure.tasks.task import Item, Task, Verdict


@dataclass(frozen=True)
class _Language:
    question: str
    answer: str
    stop: str
    strict: str


_LANGUAGES = {
    "de": _Language("Frage: {}", "Schritt-für-Schritt-Antwort:", "Frage:", r"Die Antwort lautet (\-?[0-9\.\,]+)"),
    "fr": _Language("Question : {}", "Réponse étape par étape :", "Question :", r"La réponse est (\-?[0-9\.\,]+)"),
    "th": _Language("โจทย์: {}", "คำตอบทีละขั้นตอน:", "โจทย์:", r"คำตอบคือ (\-?[0-9\.\,]+)"),
}


class Mgsm(Task):
    """Rows: `id`, `language` (de, fr, th), `question`, `answer_number`; `gsm8k_test_id` (the problem, the same in all
    languages) if you like."""

    name = "mgsm"
    title = "MGSM word problems in de, fr, th, last number (strict: after 'the answer is')"
    max_tokens = 400
    hub = tuple(HubSplit("juletxara/mgsm", language, "test") for language in _LANGUAGES)

    def from_hub(self, split: HubSplit, where: Where) -> Row:
        row = {"id": f"mgsm-{split.config}-{where.line - 1}", "language": split.config}
        row["gsm8k_test_id"] = f"gsm8k-test-{where.line - 1}"
        return {**row, "question": where.text("question"), "answer_number": str(where.integer("answer_number"))}

    def parse(self, where: Where) -> Item:
        fields = where.fields("language", "question", "answer_number")
        if fields["language"] not in _LANGUAGES:
            known = ", ".join(_LANGUAGES)
            raise where.error(f"the field 'language' must be one of {known}, not {fields['language']!r}.")
        return Item.of(where, fields, group="gsm8k_test_id")

    def kind(self, item: Item) -> str:
        """The item's language."""
        return str(item.fields["language"])

    def question(self, item: Item) -> str:
        language = _LANGUAGES[item.fields["language"]]
        return f"{language.question.format(item.fields['question'])}\n{language.answer}"

    def stop(self, item: Item) -> list[str]:
        return [_LANGUAGES[item.fields["language"]].stop, "</s>", "<|im_end|>"]

    def score(self, item: Item, text: str, tokens: Sequence[int]) -> Verdict:
        """Correct: the last number is the answer. Detail: `strict`, and `value` (equal as numbers)."""
        expected = str(item.fields["answer_number"])
        flexible = extraction.raw_flexible_number(text)
        match = re.search(_LANGUAGES[item.fields["language"]].strict, text)
        strict = match[1] if match else ""
        return Verdict(
            extraction.same_without_punctuation(flexible, expected), flexible, expected,
            {
                "strict": extraction.same_without_punctuation(strict, expected),
                "value": extraction.same_value(extraction.normalise_number(flexible), expected),
            },
        )  # fmt: skip
