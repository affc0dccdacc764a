"""/v1/messages, Anthropic's protocol, as far as text, thoughts and tools go. A chat completion does the work."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.serve.answer_requests import AnswerRequest
from pyfly_cpp.serve.answers import Event
from pyfly_cpp.serve.api_errors import ApiError, bad_request
from pyfly_cpp.serve.chat import ChatAnswer
from pyfly_cpp.serve.prompt_reading import ChatInput
from pyfly_cpp.serve.requests import AnthropicMessage, ChatRequest, CountRequest, MessageRequest, read_content
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.timings import Progress
from pyfly_cpp.serve.tools import Call, read_arguments

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


class Message:
    """A message of the assistant: blocks of thoughts, text and calls."""

    is_named, is_marked = True, False
    tells_progress = False

    def __init__(self, model: Model, settings: Settings, body: MessageRequest, decoding: Decoding) -> None:
        if body.thread is not None:
            # By these details, Anthropic's client knows that it has to send the whole conversation.
            unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise bad_request("nothing is stored here, so there are no threads; send the whole conversation.", "thread",
                              more={"details": unsupported})  # fmt: skip
        self._chat = ChatAnswer(model, settings, as_chat(body), decoding)
        self._name = settings.name
        self.requests: list[AnswerRequest] = self._chat.requests
        self.headers = self._chat.headers
        self.stream = bool(body.stream)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._content: list[dict[str, Any]] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the last call
        self._finish: str | None = None
        self._stop_sequences = body.stop_sequences or ()
        self._stop_sequence: str | None = None

    def begin(self) -> Iterable[Event]:
        """That it begins."""
        yield {"type": "message_start", "message": self._message()}

    def add(self, i: int, piece: Piece | Progress) -> Iterable[Event]:
        """Thoughts, text and calls."""
        self._chat.note(i, piece)
        if not isinstance(piece, Piece):
            return
        for delta in self._chat.deltas(i, piece):
            for kind, text in (("thinking", delta.thought), ("text", delta.text)):
                if text:
                    yield from self._write(kind, text)
            if delta.call is not None:
                yield from self._tell_call(delta.call, delta.begins)
            self._finish = delta.finish or self._finish
        if piece.stop_string and piece.stop_string in self._stop_sequences and self._finish != "tool_calls":
            self._stop_sequence = piece.stop_string

    def end(self) -> Iterable[Event]:
        """That it has ended."""
        yield from self._close()
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def fail(self, failure: ApiError) -> Event:
        """The error as it is."""
        return failure.body()

    def whole(self) -> Event:
        """The message."""
        for _ in self._close():
            pass
        return self._message()

    def _message(self) -> dict[str, Any]:
        reason = None if self._finish is None else _STOP_REASONS[self._finish]
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._name, "content": self._content,
            "stop_reason": reason if self._stop_sequence is None else "stop_sequence",
            "stop_sequence": self._stop_sequence, "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, int]:
        """The tokens; this protocol counts those of the prompt that were cached by themselves."""
        usage = self._chat.usage()
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - n_cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached, "output_tokens": usage["completion_tokens"],
        }  # fmt: skip

    def _write(self, kind: str, text: str) -> Iterable[Event]:
        if not self._is_open or self._content[-1]["type"] != kind:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            yield from self._open(block)
        self._content[-1][kind] += text
        yield self._event("delta", delta={"type": _DELTAS[kind], kind: text})

    def _tell_call(self, call: Call, begins: bool) -> Iterable[Event]:
        if begins:
            yield from self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self._arguments = ""
        self._arguments += call.arguments
        yield self._event("delta", delta={"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, block: dict[str, Any]) -> Iterable[Event]:
        yield from self._close()
        self._content.append(block)
        self._is_open = True
        yield self._event("start", content_block=dict(block))

    def _close(self) -> Iterable[Event]:
        if self._is_open:
            self._is_open = False
            if self._content[-1]["type"] == "tool_use":
                self._content[-1]["input"] = read_arguments(self._arguments)
            yield self._event("stop")

    def _event(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": len(self._content) - 1, **fields}


_SAME = ("stream", "temperature", "top_p", "top_k", "seed", "max_tokens")
"""Fields that a chat completion has in common."""


def as_chat(body: CountRequest) -> ChatInput:
    """The request as a chat. Raises ApiError: a message has something else than text and calls."""
    system = _text_of(body.system, "system")
    messages = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body.messages):
        messages += _messages_of(message, f"messages[{i}].content")
    functions = [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        for tool in body.tools or ()
    ]
    choice, output = body.tool_choice, body.output_config
    wanted = None
    if choice is not None:
        wanted = ("required", choice.name or "") if choice.type == "tool" else (_CHOICES[choice.type], None)
    own = {name: getattr(body, name) for name in _SAME} if isinstance(body, MessageRequest) else {}
    chat = ChatRequest.model_construct(
        **own,
        stop=body.stop_sequences if isinstance(body, MessageRequest) else None,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        chat_template_kwargs={"enable_thinking": body.thinking is not None and body.thinking.type != "disabled"},
        thinking_budget_tokens=None if body.thinking is None else body.thinking.budget_tokens,
        response_format=None if output is None else output.format,
        reasoning_effort=None if output is None else output.effort,
    )
    return ChatInput(chat, messages, functions, wanted)


def _messages_of(message: AnthropicMessage, path: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    calls, thoughts, texts = [], [], [message.content] if isinstance(message.content, str) else []
    for block in () if isinstance(message.content, str) else message.content:
        if block.type == "tool_result":
            text = _text_of(block.content, path)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text})
        elif block.type == "tool_use":
            if block.name is None:
                raise bad_request(f"{path} has a tool_use without a name.", path)
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(read_content([block], path))
    if results and not texts:
        return results
    own: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    own.update({"tool_calls": calls} if calls else {})
    own.update({"reasoning_content": "".join(thoughts)} if thoughts else {})
    return [*results, own]


def _text_of(content: Any, path: str) -> str:
    return content or "" if not isinstance(content, list) else "\n".join(read_content([part], path) for part in content)
