"""From the messages of a chat to the tokens of a prompt, by the base class's own chat handlers."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llama_cpp import llama_chat_format

from pyfly_cpp.engine.markers import CLOSE, END_FUNCTION, END_PARAMETER, FUNCTION, OPEN, PARAMETER, find_markers
from pyfly_cpp.llama.strict_grammars import asking_a_format

_PROBE = "pyfly_part"
_CONVERSATION = [{"role": role, "content": "."} for role in ("system", "user", "assistant", "user")]


class Rendered(NamedTuple):
    """A prompt that a chat format has made."""

    tokens: list[int]
    stop: list[str]
    """Texts that end the answer, by the format."""
    text: str
    """The prompt as the format has written it; empty if it made tokens."""


def chat_formats() -> list[str]:
    """The names of llama-cpp-python's own chat formats."""
    return list(llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers)


def chat_handler(llm: Any) -> Any:
    """What turns messages into completions for a `Llama`, as the base class chooses it."""
    return (
        llm.chat_handler
        or llm._chat_handlers.get(llm.chat_format)
        or llama_chat_format.get_chat_completion_handler(llm.chat_format)
    )


_OF_A_FORMATTER = llama_chat_format.chat_formatter_to_chat_completion_handler(lambda **_: None).__code__
"""The code of all handlers that only format messages."""


def only_formats(handler: Any) -> bool:
    """Whether a chat handler only makes a prompt of messages: all but chatml-function-calling, functionary and
    handlers of somebody's own."""
    return getattr(handler, "__code__", None) is _OF_A_FORMATTER


def is_own(handler: Any) -> bool:
    """Whether a chat handler is none of llama-cpp-python's, so that nobody knows what it takes."""
    code = handler if hasattr(handler, "__code__") else type(handler).__call__
    return not str(getattr(code, "__module__", "")).startswith("llama_cpp.")


def takes_texts(handler: Any) -> bool:
    """Whether a chat handler needs contents that are texts: llama-cpp-python's formats, and those templates in Jinja
    that do not write the parts of a content."""
    if not only_formats(handler):
        return False
    formatter = handler.__closure__[handler.__code__.co_freevars.index("chat_formatter")].cell_contents
    if isinstance(formatter, llama_chat_format.Jinja2ChatFormatter):
        return not _writes_parts(formatter.template)
    return str(getattr(formatter, "__module__", "")).startswith("llama_cpp.")


@functools.lru_cache(64)
def _writes_parts(template: str) -> bool:
    """Whether a template in Jinja writes the text of a part, and not the part."""
    messages = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
    try:
        prompt = llama_chat_format.Jinja2ChatFormatter(template, "", "")(messages=messages).prompt
    except Exception:  # whatever a template raises
        return False
    return re.search(rf"(?<!['\"]){_PROBE}(?!['\"])", prompt) is not None


def as_texts(messages: Sequence[Any]) -> list[Any]:
    """Messages whose contents are texts, for a handler of `takes_texts`: parts are joined. Raises ValueError: a part is
    no text."""
    return [_as_text(i, message) for i, message in enumerate(messages)]


def _as_text(i: int, message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"messages[{i}] has a part of the type {kind!r}, but this model's chat format takes text only; remove "
                "that part, or load a FlyLlama with a chat_handler of llama_cpp.llama_chat_format for images."
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def hear_chat(llm: Any, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
    """The first completion that a chat format asks for: arguments of `create_completion`, the prompt as tokens. Nothing
    is evaluated; several threads may do it at the same time.

    Args:
        llm: A `Llama`.
        messages, **options: As of `create_chat_completion`.

    Raises:
        Exception: what the format, a template of whoever made the model, raises of messages that it does not take.
    """
    return _listen(_Listener(llm), chat_handler(llm), messages, options)


def _listen(listener: _Listener, handler: Any, messages: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(_Heard), asking_a_format():
        handler(llama=listener, messages=list(messages), **options)
    return listener.heard


def render_chat(
    llm: Any, messages: Sequence[Any], *, behind: str = "", handler: Any = None, **options: Any
) -> Rendered:
    """Applies a model's chat format; as of `hear_chat`.

    Args:
        behind: Text that stands behind the prompt: what the answer begins with.
        handler: A chat handler instead of the model's own.
    """
    listener = _Listener(llm, behind)
    heard = _listen(listener, handler or chat_handler(llm), messages, {"temperature": 0.0, **options})
    stop = heard.get("stop")
    stops = [stop] if isinstance(stop, str) else [entry for entry in stop or [] if entry]
    return Rendered(heard["prompt"], stops, listener.text)


def markers_of(llm: Any) -> tuple[str, ...]:
    """The markers (engine/markers.py) that a loaded `Llama` writes with several tokens, sorted; what is a single one is
    protected itself. Found in the GGUF file's chat templates and, if the chat format is one of llama-cpp-python's own,
    in what it makes of a short conversation. The marks of tool calls that the server reads are always among them."""
    texts = [text for key, text in llm.metadata.items() if key.startswith("tokenizer.chat_template")]
    if llm.chat_handler is None and not llm.chat_format.startswith("chat_template."):
        with contextlib.suppress(Exception):  # a format that does not take this conversation
            texts.append(
                llm.detokenize(render_chat(llm, _CONVERSATION).tokens, special=True).decode("utf-8", "replace")
            )
    found = {OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER}.union(*map(find_markers, texts))
    return tuple(sorted(m for m in found if len(llm._model.tokenize(m.encode("utf-8"), False, True)) > 1))


class _Heard(Exception):
    """A chat handler has shown what it would complete."""


class _Listener:
    """Stands in for a Llama before a chat handler, to hear which completion it makes of messages."""

    def __init__(self, llm: Any, behind: str = "") -> None:
        self._llm = llm
        self._behind = behind
        self.text = ""
        self.heard: dict[str, Any] = {"prompt": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """`Llama.tokenize`, which also keeps the text."""
        self.text = text.decode("utf-8") + self._behind
        tokens: list[int] = self._llm.tokenize(self.text.encode("utf-8"), add_bos, special)
        return tokens

    def create_completion(self, prompt: Any, **arguments: Any) -> Any:
        """Keeps what is asked for and ends the handler."""
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt.encode("utf-8"), add_bos=True, special=True)
        self.heard = {**arguments, "prompt": list(prompt)}
        raise _Heard
