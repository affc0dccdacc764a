"""Reading an answer out of a model's output, the way lm-evaluation-harness does (release 0.4.13).

Pure functions of text. The patterns are those of its task files (`gsm8k.yaml`, `mgsm/native_cot/*.yaml`,
`mmlu/flan_cot_zeroshot`, `humaneval/utils.py`, `mbpp/utils.py`) and filters (`RegexFilter`, `MultiChoiceRegexFilter`).
If a chat model's habits need more than the harness reads, the function's docstring describes the difference.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Sequence

STRICT_NUMBER = re.compile(r"#### (\-?[0-9\.\,]+)")
"""`strict-match` of gsm8k.yaml: the first match counts."""

FLEXIBLE_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
"""`flexible-extract` of gsm8k.yaml: the last match counts."""

_IGNORED = [re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$")]
"""`regexes_to_ignore` of gsm8k.yaml, applied in this order to prediction and reference."""


def strict_number(text: str) -> str:
    """The number after the first `#### `, normalised; empty if there is none."""
    match = STRICT_NUMBER.search(text)
    return normalise_number(match[1].strip()) if match else ""


def flexible_number(text: str) -> str:
    """The last thing in the text that looks like a number, normalised; empty if there is none."""
    return normalise_number(raw_flexible_number(text))


def raw_flexible_number(text: str) -> str:
    """The last thing in the text that looks like a number, as written; empty if there is none.

    As in the harness, a lone `..` or `$$` looks like one too: such an output counts as wrong there and here.
    """
    matches = FLEXIBLE_NUMBER.findall(text)
    if not matches:
        return ""
    return str(next(group for group in matches[-1] if group)).strip()


def normalise_number(text: str) -> str:
    """What exact_match compares: without commas, dollar signs, a leading `... #### ` and a final full stop, lower
    case."""
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def same_number(extracted: str, expected: str) -> bool:
    """exact_match of normalised texts: `18.00` is not `18`, as in the harness."""
    return extracted != "" and extracted == normalise_number(expected)


def same_without_punctuation(extracted: str, expected: str) -> bool:
    """exact_match with ignore_case and ignore_punctuation, as the MGSM tasks compare: `1.000` is `1000`, `-5` is
    `5`."""
    table = str.maketrans("", "", string.punctuation)
    return extracted != "" and extracted.lower().translate(table) == expected.lower().translate(table)


def same_value(extracted: str, expected: str) -> bool:
    """Whether both are numbers and equal: `18.00` is `18`. Kinder than the harness; reported in addition, never
    instead."""
    try:
        return float(extracted) == float(normalise_number(expected))
    except ValueError:
        return False


# ---- Multiple choice -------------------------------------------------------------------------------------------------

_ANSWER_IS = re.compile(
    r"(?:(?i:\b(?:answer|option|choice)(?:\s+(?:is|would\s+be|must\s+be|should\s+be)|\s*:)\s*:?)|\\boxed\{)"
    r"(?:[\s*_`\"'‘“(\[$]|\\(?:boxed|text|textbf|mathrm)\{|(?i:(?:the\s)?(?:option|choice|letter)\s))*"
    r"([A-Z])\b(?!['’]\w)(?![*_`\"'’”)\]]*\s+or\s+[*_`\"'‘“(\[]*[A-Z]\b)"  # not "A's", nor "A or B"
)
_IS_THE_ANSWER = re.compile(  # not "neither A nor B is the answer", nor "A is the option that ..."
    r"(?:^|[.!?:;,]\s|(?i:\b(?:so|thus|therefore|option|choice|letter|answer),?\s))[\s*_`\"'(\[]*([A-Z])[*_`\"')\]]*"
    r"\s+is\s+the\s+(?:final\s+|correct\s+|best\s+|right\s+)?(?:answer|option|choice)\b(?!\s+(?:that|which)\b)",
    re.MULTILINE,
)
_PARENTHESISED = re.compile(r"(?<!\b[Nn]ot )(?<!n['’]t )\(([A-Z])\)")
_LEADING = re.compile(r"\A(?!\s*A\s+[a-z])[\s*_`\"'(\[]*([A-Z])(?:[\s*_`\"')\].,]|\Z)")  # "A dog" is no answer A
_ALONE = re.compile(r"\A[\s*_`\"'(\[]*([A-Z])[*_`\"')\].:,]*(?:[^\S\n]+(.*))?\Z")
_AFTER_COLON = re.compile(r":[\s]*\(?([A-Z])\b")


def choice_letter(text: str, choices: Sequence[str]) -> str:
    """The letter (A, B, ...) that an output chooses; empty if none can be read.

    The harness scores these tasks by log-likelihood, or reads `(X)` from a generation and falls back on the text of a
    choice, then on `: X` (`flexible-extract` of `mmlu/flan_cot_zeroshot`). Chat models also write a lone letter, "the
    answer is X", `\\boxed{X}` or "X is the answer". In order, the first that yields a letter in range: the last "answer
    is X" or `\\boxed{X}`; the last "X is the answer"; the first line, if it is a letter alone or with its choice's
    text. If the next line is another, the output begins with a list of the choices; what follows the list is read: the
    last `(X)`; a letter at its very beginning; the last `: X`; the last choice whose whole text occurs (longest first).
    """
    letters = [chr(ord("A") + i) for i in range(len(choices))]

    def last(pattern: re.Pattern[str], text: str) -> str:
        found = [letter for letter in pattern.findall(text) if letter in letters]
        return str(found[-1]) if found else ""

    if letter := last(_ANSWER_IS, text) or last(_IS_THE_ANSWER, text):
        return letter
    listed, text = _listed(text, dict(zip(letters, choices)))
    if len({*listed}) == 1:
        return listed[0]
    leading = _LEADING.search(text)
    letter = (
        last(_PARENTHESISED, text)
        or (leading[1] if leading and leading[1] in letters else "")
        or last(_AFTER_COLON, text)
    )
    if letter:
        return letter
    by_text = {choice.strip().lower(): letter for choice, letter in zip(choices, letters)}
    texts = sorted((text for text in by_text if text), key=len, reverse=True)
    if texts:
        whole = re.compile(r"(?<!\w)(?:" + "|".join(re.escape(entry) for entry in texts) + r")(?!\w)")
        found = whole.findall(text.lower())
        if found:
            return by_text[found[-1]]
    return ""


def _listed(text: str, choices: dict[str, str]) -> tuple[list[str], str]:
    """The letters of the lines at a text's beginning that consist of one, and what follows these lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    listed = list(itertools.takewhile(bool, (_lone_letter(line, choices) for line in lines)))
    return listed, "\n".join(lines[len(listed) :])


def _lone_letter(line: str, choices: dict[str, str]) -> str:
    """The letter that a line consists of, with the text of its choice or without; empty if there is more in it."""
    alone = _ALONE.search(line)
    if alone is None or alone[1] not in choices:
        return ""
    rest = (alone[2] or "").strip(" *_`\"'.").lower()
    return alone[1] if rest in ("", choices[alone[1]].strip(" .").lower()) else ""


# ---- Code ------------------------------------------------------------------------------------------------------------


def until_fence(text: str) -> str:
    """An answer that began inside a code block, up to the fence that closes it.

    As `build_predictions_instruct` of humaneval/utils.py. For MBPP the harness drops an answer whose fence never comes;
    here such an answer (cut at the limit of tokens) is judged by what there is, since the fence ends generation anyway.
    """
    end = text.find("```")
    return text if end < 0 else text[:end]
