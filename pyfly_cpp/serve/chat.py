"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.markers import THOUGHTS
from pyfly_cpp.engine.output import Piece, Token
from pyfly_cpp.engine.prompting import Rendered
from pyfly_cpp.serve.answers import Event, Shared, read_format
from pyfly_cpp.serve.calls import CallReader
from pyfly_cpp.serve.completions import joined
from pyfly_cpp.serve.contents import read_content
from pyfly_cpp.serve.errors import bad_request
from pyfly_cpp.serve.model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.thoughts import ThoughtReader, budget_processor, opened_by
from pyfly_cpp.serve.tools import Call, Tools


class Chat(Shared):
    """A chat completion: n answers to the messages."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: Model, settings: Settings, body: Mapping[str, Any], decoding: Decoding) -> None:
        super().__init__(model, settings, body, decoding)
        self.tools = _tools(model, body)
        self.is_older = bool(body.get("functions"))
        """Whether the request speaks of functions, as it was done before tools."""
        self.one_alone = self.is_older or body.get("parallel_tool_calls") is False or (
            self.tools.choice == "required" and body.get("parallel_tool_calls") is None
        )  # fmt: skip
        grammar = read_format(body, body.get("response_format"), "response_format")
        self.reads_calls = bool(self.tools.functions) and self.tools.choice != "none"
        if self.tools.choice == "required":
            if grammar is not None and grammar.kind == "gbnf":
                raise bad_request("an answer cannot be a call and follow a grammar; leave one out.", "grammar")
            grammar = self.tools.constraint(not self.one_alone)
        elif self.reads_calls and grammar is not None:
            self.reads_calls = grammar.kind == "schema"
            grammar = grammar.or_else(self.tools.constraint(False)) if self.reads_calls else grammar
        rendered = _render(model, self.tools, body)
        self._verbose = {"__verbose": {"prompt": rendered.text}} if body.get("verbose") else {}
        closing = opened_by(model.text(rendered.tokens[-16:], special=True))
        budget = body.get("reasoning_budget_tokens")
        budget = body.get("thinking_budget_tokens") if budget is None else budget
        prompt = rendered.tokens
        if closing is not None and (grammar is not None or budget == 0):  # there is no place for thoughts
            prompt, closing = [*prompt, *model.tokenize(f"{closing}\n\n", add_bos=False)], None
        self.closing = closing
        """What ends the thoughts that the prompt has begun; None: it has begun none."""
        self.reads_thoughts = body.get("reasoning_format") != "none" and grammar is None
        max_tokens = self.most_tokens(settings.default_max_tokens)
        top = int(body.get("top_logprobs") or 0)
        if top and not body.get("logprobs"):
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        self.order(
            [prompt], max_tokens or None, rendered.stop, grammar, top if body.get("logprobs") else None,
            processor=None if budget is None or budget < 0 or grammar is not None else self._budget(prompt, budget),
        )  # fmt: skip
        self._choices = [_Choice(self, i) for i in range(len(self.orders))]

    def _budget(self, prompt: Sequence[int], budget: int) -> Any:
        """What ends thoughts after so many tokens."""

        def tokens(text: str) -> list[int]:
            return self.model.tokenize(text, add_bos=False)

        kinds = [(opening, closing) for opening, closing in THOUGHTS if self.closing in (None, closing)]
        openings = [tokens(opening) if self.closing is None else [] for opening, _ in kinds]
        return budget_processor(len(prompt), budget, openings, [tokens(closing) for _, closing in kinds])

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
    functions = [tool["function"] for tool in body.get("tools") or []] + (body.get("functions") or [])
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
        return model.render(messages[:-1], told, read_template_arguments(body), behind=messages[-1]["content"])
    return model.render(messages, told, read_template_arguments(body), adds_prompt=adds_prompt is not False)


class _Choice:
    """One answer."""

    def __init__(self, owner: Chat, i: int) -> None:
        self._owner = owner
        self._i = i
        self._reader = CallReader(owner.tools, owner.one_alone) if owner.reads_calls else None
        self._thoughts = ThoughtReader(owner.closing) if owner.reads_thoughts else None
        self._thought: list[str] = []
        self._n_told: list[int] = []  # characters of the arguments of each call
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] | None = None if owner.orders[i].n_logprobs is None else []
        self._finish: str | None = None
        self._told: list[dict[str, Any]] = []

    def add(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """The choices of events."""
        thought, text = "", piece.text
        if self._thoughts is not None:
            thought, text = self._thoughts.add(text)
            if piece.finish is not None:
                thought, text = (x + y for x, y in zip((thought, text), self._thoughts.end()))
        if self._reader is not None:
            text = self._reader.add(text)
            text += self._reader.end() if piece.finish is not None else ""
        self._thought.append(thought)
        self._text.append(text)
        logprobs = None
        if self._logprobs is not None:
            content = [self._logprobs_of(token) for token in piece.tokens]
            self._logprobs += content
            logprobs = {"content": content}
        told = self._owner.told(piece)
        self._told += [told["pyfly"]] if told else []
        if thought or text or logprobs or told:
            delta = {"reasoning_content": thought} if thought else {}
            yield _event(self._i, {**delta, **({"content": text} if text else {})}, None, logprobs, **told)
        calls = [] if self._reader is None else self._reader.calls
        for n in range(max(0, len(self._n_told) - 1), len(calls)):
            is_new = n == len(self._n_told)
            self._n_told += [0] if is_new else []
            more = calls[n].arguments[self._n_told[n] :]
            self._n_told[n] += len(more)
            if is_new or more:
                own = call_of(calls[n]._replace(arguments=more)) if is_new else {"function": {"arguments": more}}
                told_call = {"tool_calls": [{"index": n, **own}]}
                yield _event(self._i, {"function_call": own["function"]} if self._owner.is_older else told_call)
        if piece.finish is not None:
            called = "function_call" if self._owner.is_older else "tool_calls"
            self._finish = called if calls and piece.finish == "stop" else piece.finish
            yield _event(self._i, {}, self._finish)

    def whole(self) -> dict[str, Any]:
        """The choice of a response."""
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if any(self._thought):
            message["reasoning_content"] = "".join(self._thought)
        if self._reader is not None and self._reader.calls:
            message["content"] = text if text.strip() else None
            calls = [call_of(call) for call in self._reader.calls]
            message.update({"function_call": calls[0]["function"]} if self._owner.is_older else {"tool_calls": calls})
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


def read_template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template is told besides messages and tools."""
    effort, out = body.get("reasoning_effort"), dict(body.get("chat_template_kwargs") or {})
    if effort is not None:
        out = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {}), **out}
    if 0 in (body.get("reasoning_budget_tokens"), body.get("thinking_budget_tokens")):
        out = {"enable_thinking": False, **out}
    return out


def read_choice(body: Mapping[str, Any], has_tools: bool) -> tuple[str, str | None]:
    """none, auto or required, and the name of the only function that may be called."""
    choice = body.get("tool_choice") or body.get("function_call")
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
        if own["role"] == "function":
            own["role"] = "tool"
        if own.get("function_call"):
            own["tool_calls"] = [{"function": own.pop("function_call")}]
        if "content" not in message and not own.get("tool_calls"):
            raise bad_request(f"messages[{i}].content is missing.", f"messages[{i}].content")
        if own.get("tool_calls"):
            own["tool_calls"] = [
                {**call, "type": "function",
                 "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"), i)}}
                for call in own["tool_calls"]
            ]  # fmt: skip
        out.append(own)
    return out


def _arguments(text: str | dict[str, Any] | None, i: int) -> Any:
    if not isinstance(text, str):
        return text or {}
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        raise bad_request(f"messages[{i}] has a call whose arguments are not JSON.", f"messages[{i}].tool_calls") \
            from None  # fmt: skip
    return value
