"""Markers of a chat that a model writes with ordinary tokens: found in its chat format, and never written loosely.

What is found, in the GGUF file's chat templates and, if the chat format is one of llama-cpp-python's own, in what it
makes of a short conversation: tags (`<tool_call>`, `</think>`, `<function=`), capitals in brackets (`[INST]`) and
headings of a turn (`### Response:`). The marks of tool calls that the server reads are always among them. A marker that
is a single token of the vocabulary is left out: that token is protected itself.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from pyfly_cpp.engine.prompting import render_chat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
THOUGHTS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"),
)  # fmt: skip
"""What opens and closes thoughts."""
READ = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER, *(text for pair in THOUGHTS for text in pair))
"""The markers that are looked for in the text of an answer."""

_MARKER = re.compile(r"</?\|?[A-Za-z_][\w|.-]*[>=]|\[/?[A-Z][A-Z_]+\]|#{2,} ?[A-Z][A-Za-z ]*:")

_CONVERSATION = [{"role": role, "content": "."} for role in ("system", "user", "assistant", "user")]


def find_markers(text: str) -> set[str]:
    """The markers in a chat template or a conversation."""
    return set(_MARKER.findall(text))


def markers_of(llm: Any) -> tuple[str, ...]:
    """The markers of a loaded `Llama` that its vocabulary has no token for, sorted."""
    texts = [text for key, text in llm.metadata.items() if key.startswith("tokenizer.chat_template")]
    if llm.chat_handler is None and not llm.chat_format.startswith("chat_template."):
        with contextlib.suppress(Exception):  # a format that does not take this conversation
            texts.append(
                llm.detokenize(render_chat(llm, _CONVERSATION).tokens, special=True).decode("utf-8", "replace")
            )
    found = {OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER}.union(*map(find_markers, texts))
    return tuple(sorted(m for m in found if len(llm._model.tokenize(m.encode("utf-8"), False, True)) > 1))
