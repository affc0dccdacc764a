"""From the messages of a chat to the tokens of a prompt, by the base class's own chat handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_cpp import llama_chat_format


class Rendered(NamedTuple):
    """A prompt that a chat format has made."""

    tokens: list[int]
    stop: list[str]
    """Texts that end the answer, as the format says."""


def render_chat(llm: Any, messages: Sequence[Any], **options: Any) -> Rendered:
    """Applies a model's chat format. Nothing is evaluated; several threads may do it at once.

    Args:
        llm: A `Llama`.
        messages: As of `create_chat_completion`.
        **options: What else of it the format may look at: tools, tool_choice.

    Raises:
        Exception: what the format, a template of whoever made the model, raises of messages that it does not take.
    """
    handler = (
        llm.chat_handler
        or llm._chat_handlers.get(llm.chat_format)
        or llama_chat_format.get_chat_completion_handler(llm.chat_format)
    )
    listener = _Listener(llm)
    with contextlib.suppress(_Heard):
        handler(llama=listener, messages=list(messages), temperature=0.0, **options)
    return Rendered(listener.prompt, listener.stop)


class _Heard(Exception):
    """A chat handler has said what it would complete."""


class _Listener:
    """Stands in for a Llama before a chat handler, to hear which prompt it makes of messages."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.prompt: list[int] = []
        self.stop: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def create_completion(self, prompt: Any, stop: Any = None, **_: Any) -> Any:
        """Keeps the prompt and ends the handler."""
        if isinstance(prompt, str):
            prompt = self._llm.tokenize(prompt.encode("utf-8"), add_bos=True, special=True)
        self.prompt = list(prompt)
        self.stop = [stop] if isinstance(stop, str) else [entry for entry in (stop or []) if entry]
        raise _Heard
