"""Markers of a chat that a model writes with ordinary tokens: found in its chat format, and never written loosely.

What is found: tags (`<tool_call>`, `</think>`, `<function=`), capitals in brackets (`[INST]`) and headings of a turn
(`### Response:`). `llama/prompting.py` looks in the chat format of a model.
"""

from __future__ import annotations

import re

from pyfly_cpp.grammar.guides import CALL_MARKERS

OPEN, CLOSE = CALL_MARKERS
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
THOUGHTS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"),
)  # fmt: skip
"""What opens and closes thoughts."""
READ = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER, *(text for pair in THOUGHTS for text in pair))
"""The markers that are looked for in the text of an answer."""

_MARKER = re.compile(r"</?\|?[A-Za-z_][\w|.-]*[>=]|\[/?[A-Z][A-Z_]+\]|#{2,} ?[A-Z][A-Za-z ]*:")


def n_begun(text: str, marker: str) -> int:
    """Characters at the end of a text that a marker begins with, and not all of it."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def find_markers(text: str) -> set[str]:
    """The markers in a chat template or a conversation."""
    return set(_MARKER.findall(text))
