"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece, Token
from pyfly_cpp.engine.prompting import Rendered
from pyfly_cpp.serve.answers import Event, Shared, read_format
from pyfly_cpp.serve.calls import CallReader
from pyfly_cpp.serve.completions import joined
from pyfly_cpp.serve.contents import read_content
from pyfly_cpp.serve.errors import bad_request
from pyfly_cpp.serve.model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.tools import Call, Tools


class Chat(Shared):
    """A chat completion: n answers to the messages."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: Model, settings: Settings, body: Mapping[str, Any], decoding: Decoding) -> None:
        super().__init__(model, settings, body, decoding)
        self.tools = _tools(model, body)
        functions = self.tools.functions
        grammar = read_format(body, body.get("response_format"), "response_format")
        if self.tools.choice == "required":
            if grammar is not None:
                raise bad_request("an answer cannot be a call and follow a format; leave one out.", "response_format")
            grammar = self.tools.constraint()
        self.reads_calls = bool(functions) and self.tools.choice != "none" and (
            grammar is None or self.tools.choice == "required"
        )  # fmt: skip
        rendered = _render(model, self.tools, body)
        self._verbose = {"__verbose": {"prompt": rendered.text}} if body.get("verbose") else {}
        max_tokens = self.most_tokens(settings.default_max_tokens)
        top = int(body.get("top_logprobs") or 0)
        if top and not body.get("logprobs"):
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        self.order([rendered.tokens], max_tokens or None, rendered.stop, grammar, top if body.get("logprobs") else None)
        self._choices = [_Choice(self, i) for i in range(len(self.orders))]

    def begin(self) -> Iterable[Event]:
        """Who speaks."""
        for i in range(len(self.orders)):
            yield self.chunk([_event(i, {"role": "assistant", "content": None})])

    def take(self, i: int, piece: Piece) -> Iterable[Event]:
        """Text, calls, the reason of the end."""
        for choice in self._choices[i].add(piece):
            yield self.chunk([choice], **self.told_times(i))

    def whole(self) -> Event:
        """All choices."""
        return {**self.response([choice.whole() for choice in self._choices]), **self._verbose}


def render(model: Model, body: Mapping[str, Any]) -> Rendered:
    """The prompt of a chat. Raises ApiError."""
    return _render(model, _tools(model, body), body)


def _tools(model: Model, body: Mapping[str, Any]) -> Tools:
    functions = [tool["function"] for tool in body.get("tools") or []]
    return Tools(functions, *read_choice(body, bool(functions)), model.template)


def _render(model: Model, tools: Tools, body: Mapping[str, Any]) -> Rendered:
    """The prompt of a chat. An answer that the messages end with is continued, unless the request forbids it. Raises
    ApiError."""
    messages, told = tools.prepare(read_messages(body["messages"]))
    adds_prompt, continues = body.get("add_generation_prompt"), body.get("continue_final_message")
    if adds_prompt and continues:
        raise bad_request("add_generation_prompt and continue_final_message exclude each other; leave one out.",
                          "continue_final_message")  # fmt: skip
    is_answered = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if continues and not is_answered:
        raise bad_request("continue_final_message needs a last message of the assistant's.", "continue_final_message")
    if is_answered and (continues or (continues is None and adds_prompt is None)):
        if len(messages) > 1 and messages[-2]["role"] == "assistant":
            raise bad_request("the messages end with two of the assistant's; join them.", "messages")
        return model.render(messages[:-1], told, behind=messages[-1]["content"])
    return model.render(messages, told, adds_prompt=adds_prompt is not False)


class _Choice:
    """One answer."""

    def __init__(self, owner: Chat, i: int) -> None:
        self._owner = owner
        self._i = i
        one_alone = owner.body.get("parallel_tool_calls") is False or owner.tools.choice == "required"
        self._reader = CallReader(owner.tools, one_alone) if owner.reads_calls else None
        self._n_calls = 0
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] | None = None if owner.orders[i].n_logprobs is None else []
        self._finish: str | None = None
        self._told: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """The choices of events."""
        text = piece.text if self._reader is None else self._reader.add(piece.text)
        if piece.finish is not None and self._reader is not None:
            text += self._reader.end()
        self._text.append(text)
        logprobs = None
        if self._logprobs is not None:
            content = [self._logprobs_of(token) for token in piece.tokens]
            self._logprobs += content
            logprobs = {"content": content}
        told = self._owner.told(piece)
        self._told += [told["pyfly"]] if told else []
        if text or logprobs or told:
            yield _event(self._i, {"content": text} if text else {}, None, logprobs, **told)
        calls = [] if self._reader is None else self._reader.calls
        for n in range(self._n_calls, len(calls)):
            yield _event(self._i, {"tool_calls": [{"index": n, **call_of(calls[n])}]})
        self._n_calls = len(calls)
        if piece.finish is not None:
            self._finish = "tool_calls" if calls and piece.finish == "stop" else piece.finish
            yield _event(self._i, {}, self._finish)

    def whole(self) -> dict[str, Any]:
        """The choice of a response."""
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._reader is not None and self._reader.calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = [call_of(call) for call in self._reader.calls]
        logprobs = None if self._logprobs is None else {"content": self._logprobs}
        out = {"index": self._i, "message": message, "logprobs": logprobs, "finish_reason": self._finish}
        return {**out, **joined(self._told)}

    def _logprobs_of(self, token: Token) -> dict[str, Any]:
        assert token.logprobs is not None
        own, top = token.logprobs
        return {**self._told_token(token.id, own), "top_logprobs": [self._told_token(*entry) for entry in top]}

    def _told_token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._owner.model.vocabulary.piece(token, True)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _event(
    i: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, **more: Any
) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}


def call_of(call: Call) -> dict[str, Any]:
    """A call, as a message has it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def read_choice(body: Mapping[str, Any], has_tools: bool) -> tuple[str, str | None]:
    """none, auto or required, and the name of the only function that may be called."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        return "required", choice["function"]["name"] if "function" in choice else choice["name"]
    return choice or ("auto" if has_tools else "none"), None


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates take them: contents are texts, arguments of calls are objects. Raises ApiError."""
    out = []
    for i, message in enumerate(messages):
        own = {key: value for key, value in message.items() if value is not None}
        own["role"] = "system" if own["role"] == "developer" else own["role"]
        own["content"] = read_content(message.get("content"), f"messages[{i}].content")
        if "content" not in message and not message.get("tool_calls"):
            raise bad_request(f"messages[{i}].content is missing.", f"messages[{i}].content")
        if own.get("tool_calls"):
            own["tool_calls"] = [
                {**call, "type": "function",
                 "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"], i)}}
                for call in own["tool_calls"]
            ]  # fmt: skip
        out.append(own)
    return out


def _arguments(text: str, i: int) -> Any:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise bad_request(f"messages[{i}] has a call whose arguments are not JSON.", f"messages[{i}].tool_calls") \
            from None  # fmt: skip
    return value
