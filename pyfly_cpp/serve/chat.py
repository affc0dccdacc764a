"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece, Token
from pyfly_cpp.serve.answers import Event, Shared, read_format
from pyfly_cpp.serve.calls import CallReader
from pyfly_cpp.serve.completions import joined
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
        functions = [tool["function"] for tool in body.get("tools") or []]
        self.tools = Tools(functions, *read_choice(body, bool(functions)), model.template)
        grammar = read_format(body, body.get("response_format"), "response_format")
        if self.tools.choice == "required":
            if grammar is not None:
                raise bad_request("an answer cannot be a call and follow a format; leave one out.", "response_format")
            grammar = self.tools.constraint()
        self.reads_calls = bool(functions) and self.tools.choice != "none" and (
            grammar is None or self.tools.choice == "required"
        )  # fmt: skip
        messages, told = self.tools.prepare(read_messages(body["messages"]))
        rendered = model.render(messages, told)
        max_tokens = body.get("max_completion_tokens")
        max_tokens = body.get("max_tokens") if max_tokens is None else max_tokens
        max_tokens = settings.default_max_tokens if max_tokens is None else int(max_tokens)
        top = int(body.get("top_logprobs") or 0)
        if top and not body.get("logprobs"):
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        self.order([rendered.tokens], max_tokens or None, rendered.stop, grammar, top if body.get("logprobs") else None)
        self._choices = [_Choice(self, i) for i in range(len(self.orders))]

    def begin(self) -> Iterable[Event]:
        """Who speaks."""
        for i in range(len(self.orders)):
            yield self.chunk([_event(i, {"role": "assistant", "content": ""})])

    def add(self, i: int, piece: Piece) -> Iterable[Event]:
        """Text, calls, the reason of the end."""
        self.count(i, piece)
        for choice in self._choices[i].add(piece):
            yield self.chunk([choice])

    def whole(self) -> Event:
        """All choices."""
        return self.response([choice.whole() for choice in self._choices])


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


def read_content(content: Any, path: str) -> str:
    """The text of a message. Raises ApiError: it has something else than text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part["type"] not in ("text", "input_text", "output_text", "refusal"):
            raise bad_request(f"{path} has a part of the type {part['type'][:40]!r}; this server takes text.", path)
        texts.append(part.get("text") or "")
    return "".join(texts)


def _arguments(text: str, i: int) -> Any:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise bad_request(f"messages[{i}] has a call whose arguments are not JSON.", f"messages[{i}].tool_calls") \
            from None  # fmt: skip
    return value
