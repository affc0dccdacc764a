"""/v1/responses, as far as text and tools go: nothing is stored, so a request brings its whole conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.serve.answer_requests import AnswerRequest
from pyfly_cpp.serve.answers import Event
from pyfly_cpp.serve.api_errors import ApiError, bad_request
from pyfly_cpp.serve.chat import ChatAnswer
from pyfly_cpp.serve.prompt_reading import ChatInput
from pyfly_cpp.serve.requests import (
    ChatRequest,
    ResponseItem,
    ResponseRequest,
    SharedFields,
    ThinkingFields,
    read_content,
    wanted_call,
)
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.timings import Progress
from pyfly_cpp.serve.tools import Call

_KINDS = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}
"""Items with text: the beginning of their ids, and the type of their texts."""


class Response:
    """A response: one answer, as a list of items. A chat completion does the work."""

    is_named = True
    is_marked = False

    def __init__(self, model: Model, settings: Settings, body: ResponseRequest, decoding: Decoding) -> None:
        if body.previous_response_id is not None:
            raise bad_request(
                "nothing is stored here, so there is no previous response; send the whole conversation as input.",
                "previous_response_id",
            )
        self._body = body
        self._name = settings.name
        self._chat = _fitting(lambda given: ChatAnswer(model, settings, given, decoding), body)
        self.requests: list[AnswerRequest] = self._chat.requests
        self.headers = self._chat.headers
        self.stream = bool(body.stream)
        self.tells_progress = self._chat.tells_progress
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._n_events = 0
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # what is being written
        self._finish: str | None = None
        self._cause: str | None = None

    def begin(self) -> Iterable[Event]:
        """That it begins."""
        yield self._event("response.created", response=self._state("in_progress"))
        yield self._event("response.in_progress", response=self._state("in_progress"))

    def add(self, i: int, piece: Piece | Progress) -> Iterable[Event]:
        """Text and calls."""
        progress = self._chat.note(i, piece)
        if progress:
            yield self._event("response.in_progress", response=self._state("in_progress"), **progress)
        if not isinstance(piece, Piece):
            return
        times = self._chat.told_times(i)
        for delta in self._chat.deltas(i, piece):
            for kind, text in (("reasoning", delta.thought), ("message", delta.text)):
                if text:
                    yield from self._write(kind, text, **times)
            if delta.call is not None:
                yield from self._tell_call(delta.call, delta.begins)
            self._finish = delta.finish or self._finish
        self._cause = piece.cause

    def end(self) -> Iterable[Event]:
        """That it has ended."""
        yield from self._finish_item()
        state = self._state(self._status)
        yield self._event(f"response.{self._status}", response=state, timings=self._chat.timings[0].as_dict())

    def fail(self, failure: ApiError) -> Event:
        """The error, in this route's shape."""
        return self._event("error", code=failure.code, message=failure.message, param=failure.param)

    def whole(self) -> Event:
        """The response."""
        for _ in self._finish_item():
            pass
        return self._state(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _write(self, kind: str, text: str, **times: Any) -> Iterable[Event]:
        if self._item is None or self._item["type"] != kind:
            yield from self._finish_item()
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            ident = f"{_KINDS[kind][0]}_{uuid.uuid4().hex}"
            yield from self._begin_item({"id": ident, "type": kind, "status": "in_progress", "content": [], **own})
            assert self._item is not None
            self._item["content"] = [_part(kind, "")]
            yield self._of_item("response.content_part.added", content_index=0, part=_part(kind, ""))
        self._item["content"][0]["text"] += text
        yield self._of_item(f"response.{_KINDS[kind][1]}.delta", content_index=0, delta=text, **_more(kind), **times)

    def _begin_item(self, item: dict[str, Any]) -> Iterable[Event]:
        self._item = item
        self._output.append(item)
        yield self._event("response.output_item.added", item=dict(item), output_index=self._place)

    def _finish_item(self) -> Iterable[Event]:
        item, kind = self._item, "" if self._item is None else self._item["type"]
        if item is None:
            return
        if kind == "function_call":
            own = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **own)
        else:
            part = item["content"][0]
            yield self._of_item(f"response.{_KINDS[kind][1]}.done", content_index=0, text=part["text"], **_more(kind))
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        item["status"] = self._status
        if kind == "function_call":
            is_whole = Call(item["call_id"], item["name"], item["arguments"]).is_whole
            item["status"] = "completed" if is_whole else "incomplete"
        yield self._event("response.output_item.done", item=item, output_index=self._place)
        self._item = None

    def _tell_call(self, call: Call, begins: bool) -> Iterable[Event]:
        if begins:
            yield from self._finish_item()
            yield from self._begin_item({
                "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress", "call_id": call.id,
                "name": call.name, "arguments": "",
            })  # fmt: skip
        assert self._item is not None
        self._item["arguments"] += call.arguments
        yield self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    @property
    def _place(self) -> int:
        return len(self._output) - 1

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._place, **fields)

    def _state(self, status: str) -> dict[str, Any]:
        usage = self._chat.usage()
        is_over = status != "in_progress"
        body = self._body.raw  # what came is told as it came
        # The protocol has no word for a stop string, or the model, that ended the answer within a call.
        reason = "max_output_tokens" if self._cause in ("length", "context", "loop") else None
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "model": self._name,
            "error": None, "output": [dict(item) for item in self._output], "store": False,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.get("instructions"), "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {}, "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": None, "temperature": body.get("temperature"), "top_p": body.get("top_p"),
            "text": body.get("text") or {"format": {"type": "text"}}, "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [], "truncation": body.get("truncation") or "disabled",
            "system_fingerprint": self._chat.system_fingerprint,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            } if is_over else None,
        }  # fmt: skip


def _part(kind: str, text: str) -> dict[str, Any]:
    own: dict[str, Any] = {"annotations": []} if kind == "message" else {}
    return {"type": _KINDS[kind][1], "text": text, **own, **_more(kind)}


def _more(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}


def _fitting(chat_of: Callable[[ChatInput], ChatAnswer], body: ResponseRequest) -> ChatAnswer:
    """The chat of a request. With truncation auto, the first of its turns are dropped as far as they do not fit; system
    messages at the beginning stay. Raises ApiError."""
    given = _as_chat(body)
    try:
        return chat_of(given)
    except ApiError as error:
        if body.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        failure = error
    messages = given.messages
    n_first = next((i for i, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    turns = [i for i, one in enumerate(messages) if one["role"] == "user" and i > n_first]
    chat = None
    while turns:
        middle = len(turns) // 2
        try:
            chat = chat_of(replace(given, messages=[*messages[:n_first], *messages[turns[middle] :]]))
            del turns[middle:]
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            del turns[: middle + 1]
    if chat is None:
        raise failure
    return chat


_SAME = tuple(name for name in (*SharedFields.model_fields, *ThinkingFields.model_fields) if name != "records")
"""Fields that a chat completion has in common."""


def _as_chat(body: ResponseRequest) -> ChatInput:
    """The request as a chat. Raises ApiError: an item is none that the server takes."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    n_before = len(messages)
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for i, item in enumerate(body.input):
            if item.type == "reasoning":  # thoughts of earlier answers
                continue
            message = _as_message(item, f"input[{i}]")
            if message.get("tool_calls") and len(messages) > n_before and messages[-1]["role"] == "assistant":
                # Of the same answer: each of its items is one of the input.
                messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                messages.append(message)
    if len(messages) == n_before:
        raise bad_request("input has no message; give one.", "input")
    chat = ChatRequest.model_construct(
        **{name: getattr(body, name) for name in _SAME},
        max_tokens=body.max_output_tokens,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=None if body.text is None else body.text.format,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    functions = [{name: value for name, value in tool.raw.items() if name != "type"} for tool in body.tools or ()]
    return ChatInput(chat, messages, functions, wanted_call(body.tool_choice))


def _as_message(item: ResponseItem, path: str) -> dict[str, Any]:
    kind = item.type or "message"
    if kind == "message":
        if item.role is None:
            raise bad_request(f"{path}.role is missing.", f"{path}.role")
        return {"role": item.role, "content": read_content(item.content, f"{path}.content")}
    if kind == "function_call":
        if item.name is None or item.arguments is None:
            raise bad_request(f"{path} is a call and lacks its name or its arguments.", path)
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id or "", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        text = read_content(item.output, f"{path}.output")
        return {"role": "tool", "tool_call_id": item.call_id or "", "content": text}
    raise bad_request(f"{path} is of the type {kind[:40]!r}; this server takes messages and calls of functions.", path)
