"""/v1/messages, Anthropic's protocol, as far as text, thoughts and tools go. A chat completion does the work."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.serve.answer_requests import AnswerRequest
from pyfly_cpp.serve.answers import Event
from pyfly_cpp.serve.api_errors import ApiError, bad_request
from pyfly_cpp.serve.chat import ChatAnswer
from pyfly_cpp.serve.contents import read_content
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.timings import Progress
from pyfly_cpp.serve.tools import read_arguments

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


class Message:
    """A message of the assistant: blocks of thoughts, text and calls."""

    is_named, is_marked = True, False
    tells_progress = False

    def __init__(self, model: Model, settings: Settings, body: Mapping[str, Any], decoding: Decoding) -> None:
        if body.get("thread") is not None:
            # By these details, Anthropic's client knows that it has to send the whole conversation.
            unsupported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise bad_request("nothing is stored here, so there are no threads; send the whole conversation.", "thread",
                              more={"details": unsupported})  # fmt: skip
        self._chat = ChatAnswer(model, settings, as_chat(body), decoding)
        self._name = settings.name
        self.requests: list[AnswerRequest] = self._chat.requests
        self.headers = self._chat.headers
        self.stream = bool(body.get("stream"))
        self._id = f"msg_{uuid.uuid4().hex}"
        self._content: list[dict[str, Any]] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the last call
        self._finish: str | None = None
        self._stop_sequences = body.get("stop_sequences") or ()
        self._stop_sequence: str | None = None

    def begin(self) -> Iterable[Event]:
        """That it begins."""
        yield {"type": "message_start", "message": self._message()}

    def add(self, i: int, piece: Piece | Progress) -> Iterable[Event]:
        """Thoughts, text and calls."""
        for chunk in self._chat.add(i, piece):
            choice = chunk["choices"][0]
            delta = choice["delta"]
            for kind, field in (("thinking", "reasoning_content"), ("text", "content")):
                if delta.get(field):
                    yield from self._write(kind, delta[field])
            for call in delta.get("tool_calls", ()):
                yield from self._tell_call(call)
            self._finish = choice["finish_reason"] or self._finish
        if isinstance(piece, Piece) and piece.stop_string in self._stop_sequences and self._finish != "tool_calls":
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

    def _tell_call(self, call: Mapping[str, Any]) -> Iterable[Event]:
        own = call["function"]
        if "id" in call:
            yield from self._open({"type": "tool_use", "id": call["id"], "name": own["name"], "input": {}})
            self._arguments = ""
        self._arguments += own["arguments"]
        yield self._event("delta", delta={"type": "input_json_delta", "partial_json": own["arguments"]})

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


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request as one for a chat completion."""
    same = ("stream", "temperature", "top_p", "top_k", "seed", "max_tokens")
    out: dict[str, Any] = {name: body[name] for name in same if body.get(name) is not None}
    system = _text_of(body.get("system"), "system")
    out["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body["messages"]):
        out["messages"] += _messages_of(message, f"messages[{i}].content")
    out["stop"] = body.get("stop_sequences")
    out["tools"] = [
        {"function": {"name": tool["name"], "description": tool.get("description") or "",
                      "parameters": tool["input_schema"]}}
        for tool in body.get("tools") or []
    ]  # fmt: skip
    choice = body.get("tool_choice")
    if choice is not None:
        named = {"function": {"name": choice.get("name") or ""}}
        out["tool_choice"] = named if choice["type"] == "tool" else _CHOICES[choice["type"]]
        if choice.get("disable_parallel_tool_use"):
            out["parallel_tool_calls"] = False
    thinking = body.get("thinking") or {"type": "disabled"}
    out["chat_template_kwargs"] = {"enable_thinking": thinking["type"] != "disabled"}
    out["thinking_budget_tokens"] = thinking.get("budget_tokens")
    output = body.get("output_config") or {}
    out["response_format"], out["reasoning_effort"] = output.get("format"), output.get("effort")
    return out


def _messages_of(message: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    results, calls, thoughts, texts = [], [], [], []
    for block in blocks:
        kind = block["type"]
        if kind == "tool_result":
            text = _text_of(block.get("content"), path)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text})
        elif kind == "tool_use":
            if block.get("name") is None:
                raise bad_request(f"{path} has a tool_use without a name.", path)
            function = {"name": block["name"], "arguments": block.get("input")}
            calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            texts.append(read_content([block], path))
    if results and not texts:
        return results
    own: dict[str, Any] = {"role": message["role"], "content": "\n".join(texts)}
    own.update({"tool_calls": calls} if calls else {})
    own.update({"reasoning_content": "".join(thoughts)} if thoughts else {})
    return [*results, own]


def _text_of(content: Any, path: str) -> str:
    return content or "" if not isinstance(content, list) else "\n".join(read_content([part], path) for part in content)
