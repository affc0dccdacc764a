"""The chat template of a server: the model's own, another that was given, or one that llama.cpp has built in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format


def built_in() -> list[str]:
    """Names of llama.cpp's own templates."""
    n = llama_cpp.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    llama_cpp.llama_chat_builtin_templates(ctypes.cast(names, ctypes.POINTER(ctypes.c_char_p)), n)
    return [name.decode() for name in names if name is not None]


def handler_of(template: str, bos: str, eos: str, adds_prompt: bool = True) -> Any:
    """A chat handler of llama-cpp-python.

    Args:
        template: In Jinja, or the name of a built-in one.
        bos, eos: Texts of the tokens that a text begins and ends with.
        adds_prompt: Whether the prompt ends with the beginning of an answer.

    Raises:
        ValueError: the template cannot be read.
    """
    if template in built_in():
        return llama_chat_format.chat_formatter_to_chat_completion_handler(_BuiltIn(template, eos, adds_prompt))
    try:
        return llama_chat_format.Jinja2ChatFormatter(template, eos, bos, adds_prompt).to_chat_handler()
    except Exception as error:  # jinja2's, which is no dependency of ours
        raise ValueError(f"the chat template cannot be read: {error}; give one in Jinja, or a name.") from error


class _BuiltIn:
    """A formatter of llama-cpp-python."""

    def __init__(self, name: str, eos: str, adds_prompt: bool) -> None:
        self._name = name.encode()
        self._eos = eos
        self._adds_prompt = adds_prompt

    def __call__(self, *, messages: Sequence[Any], **_: Any) -> llama_chat_format.ChatFormatterResponse:
        given = [(message["role"].encode(), message["content"].encode()) for message in messages]
        chat = (llama_cpp.llama_chat_message * len(given))(*given)
        first: tuple[Any, ...] = (self._name, chat, len(given), self._adds_prompt)
        n = max(0, llama_cpp.llama_chat_apply_template(*first, None, 0))
        buffer = ctypes.create_string_buffer(n + 1)
        llama_cpp.llama_chat_apply_template(*first, buffer, n + 1)
        return llama_chat_format.ChatFormatterResponse(
            prompt=buffer.raw[:n].decode(), stop=[self._eos] if self._eos else []
        )
