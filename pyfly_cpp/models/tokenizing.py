"""Texts with words so long that llama.cpp would end the process.

It splits the texts of many vocabularies by std::regex, which goes one call deeper with every character of a match: some
thousand letters without a space in between are more than the stack of a thread holds.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from pyfly_cpp.machine.releases import SPLIT_BY_OWN_CODE

_LONG, _LONGEST = 2**11, 2**17
"""Bytes of words that any stack holds, and that the deep one does: about 320 bytes of it go to each (libstdc++)."""
_STACK = 2**28  # bytes; what is not used is not taken
_SPACES = re.compile(rb"\s+")
_SHORT = 2000  # characters of a word that any stack holds
_NOT_SHORT = re.compile(rf"(?<!\S)\S{{{_SHORT + 1},}}|(?<!\s)\s{{{_SHORT + 1},}}")
_ONE_AT_A_TIME = threading.Lock()

T = TypeVar("T")


def tokenized(tokenize: Callable[[], T], text: bytes, metadata: Mapping[str, str]) -> T:
    """Calls `tokenize`, which hands the text to llama.cpp, if there is stack enough for it.

    Args:
        text: The text, in bytes.
        metadata: Reads a value of the model's file by its key.

    Raises:
        ValueError: there is no such stack.
    """
    if len(text) <= _LONG or metadata.get("tokenizer.ggml.model") != "gpt2":
        return tokenize()
    n = 0 if metadata.get("tokenizer.ggml.pre") in SPLIT_BY_OWN_CODE else _longest_word(text)
    if n <= _LONG:
        return tokenize()
    if n > _LONGEST:
        raise ValueError(
            f"the text has {n} bytes without a space in between, or of spaces alone; the tokenizer of this model takes "
            f"{_LONGEST} at most: break the line."
        )
    return _on_a_deep_stack(tokenize)


def in_short_words(text: str) -> list[str]:
    """The text, cut in words (and runs of spaces) of over 2000 characters, which `tokenized` is for: for those who do
    not mind where such a word is cut."""
    cuts = [cut for word in _NOT_SHORT.finditer(text) for cut in range(word.start() + _SHORT, word.end(), _SHORT)]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)]) if start < end]


def _longest_word(text: bytes) -> int:
    return max(map(len, itertools.chain(text.split(), _SPACES.findall(text))), default=0)


def _on_a_deep_stack(function: Callable[[], T]) -> T:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as failure:
            future.set_exception(failure)

    with _ONE_AT_A_TIME:
        before = threading.stack_size(_STACK)  # of all threads that begin now
        try:
            threading.Thread(target=run, name="pyfly-tokenizer").start()
        finally:
            threading.stack_size(before)
        return future.result()
