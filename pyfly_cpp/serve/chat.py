"""The answers of chats, whatever their protocol, and the codec of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.serve.answers import Event, Shared, Told
from pyfly_cpp.serve.api_errors import bad_request
from pyfly_cpp.serve.calls import CallReader
from pyfly_cpp.serve.prompt_reading import ChatInput, ChatPrompt, input_of
from pyfly_cpp.serve.requests import ChatRequest
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.streams import Entries
from pyfly_cpp.serve.thoughts import Budget, ThoughtReader
from pyfly_cpp.serve.tools import Call


class Delta(NamedTuple):
    """A part that the answer of a chat has grown by: thoughts and text, or a call, or its end."""

    thought: str = ""
    text: str = ""
    call: Call | None = None
    """A call, with those of its arguments that are new."""
    place: int = 0
    """The number of the call, from 0."""
    begins: bool = False
    """Whether the call is a new one."""
    finish: str | None = None
    """Why the answer has ended, in the words of chat completions; None: it goes on."""
    logprobs: dict[str, Any] | None = None
    told: Mapping[str, Any] = MappingProxyType({})
    """How the tokens came, if a client asked."""


class ChatAnswer(Shared):
    """A chat completion: n answers to the messages."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: Model, settings: Settings, given: ChatInput, decoding: Decoding) -> None:
        body = given.body
        super().__init__(model, settings, body, decoding)
        self.prompt = prompt = ChatPrompt(model, settings, given)
        self._verbose = {"__verbose": {"prompt": prompt.text}} if body.verbose else {}
        self.reads_thoughts = body.reasoning_format != "none" and prompt.grammar is None
        max_tokens = self.most_tokens(settings.default_max_tokens or -1)
        top = body.top_logprobs or 0
        if top and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        self.ask(
            [prompt.tokens], max_tokens, prompt.stop, prompt.grammar, top if body.logprobs else None,
            new_processor=None if prompt.budget is None or prompt.grammar is not None else self._ending(prompt.budget),
            shown=model.marker_tokens,
        )  # fmt: skip
        self._choices = [_Choice(self, i) for i in range(len(self.requests))]

    def _ending(self, budget: int) -> Callable[[], Budget]:
        """What makes the logits processor that ends the thoughts of an answer after so many tokens."""
        model, prompt = self.model, self.prompt
        piece_of, closings = model.chat_pieces(), model.closings

        def new() -> Budget:
            return Budget(len(prompt.tokens), budget, ThoughtReader(prompt.closing), piece_of, closings)

        return new

    def begin(self) -> Iterable[Event]:
        """Who speaks."""
        for i in range(len(self.requests)):
            yield self.chunk([_event(i, {"role": "assistant", "content": None})])

    def take(self, i: int, piece: Piece) -> Iterable[Event]:
        """Text, calls, the reason of the end."""
        for delta in self.deltas(i, piece):
            choice = _event(i, self._shown(delta), delta.finish, delta.logprobs, **delta.told)
            yield self.chunk([choice], **self.told_times(i))

    def deltas(self, i: int, piece: Piece) -> Iterable[Delta]:
        """The parts that a piece adds to answer i."""
        return self._choices[i].add(piece)

    def _shown(self, delta: Delta) -> dict[str, Any]:
        if delta.call is not None:
            own = _call_of(delta.call) if delta.begins else {"function": {"arguments": delta.call.arguments}}
            older, newer = {"function_call": own["function"]}, {"tool_calls": [{"index": delta.place, **own}]}
            return older if self.prompt.is_older else newer
        thought = {"reasoning_content": delta.thought} if delta.thought else {}
        return {**thought, **({"content": delta.text} if delta.text else {})}

    def usage(self) -> dict[str, Any]:
        """Of all choices, with the number of tokens that are thoughts."""
        n = sum(choice.n_thought for choice in self._choices)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": n}}

    def whole(self) -> Event:
        """All choices."""
        return {**self.response([choice.whole() for choice in self._choices]), **self._verbose}


def chat_completion(model: Model, settings: Settings, body: ChatRequest, decoding: Decoding) -> ChatAnswer:
    """The answer to a body of /v1/chat/completions. Raises ApiError: the request cannot be served."""
    return ChatAnswer(model, settings, input_of(body), decoding)


class _Choice:
    """One answer."""

    def __init__(self, owner: ChatAnswer, i: int) -> None:
        self._owner = owner
        self._i = i
        prompt = owner.prompt
        self._is_older = prompt.is_older
        self._reader = CallReader(prompt.tools, prompt.one_alone) if prompt.reads_calls else None
        self._thoughts = None
        if owner.reads_thoughts:
            self._thoughts = ThoughtReader(prompt.closing, prompt.has_ended_thoughts, prompt.continues_thoughts)
        # As the text is wanted with its markers, the one that the prompt has written is needed, too.
        self._before = "" if owner.reads_thoughts else prompt.opening
        self._thought: list[str] = []
        self._n_read = 0  # tokens
        self.n_thought = 0
        """Tokens of the thoughts, with their markers."""
        self._n_told: list[int] = []  # characters of the arguments of each call
        self._text: list[str] = []
        self._logprobs = None if owner.requests[i].n_logprobs is None else Entries()
        self._finish: str | None = None
        self._told = Told()

    def add(self, piece: Piece) -> Iterable[Delta]:
        """The parts that a piece adds."""
        thought, text = self._read(piece)
        text, self._before = self._before + text, ""
        if self._reader is not None:
            text = self._reader.add(text)
            text += self._reader.end() if piece.finish is not None else ""
        self._thought.append(thought)
        self._text.append(text)
        logprobs = None
        if self._logprobs is not None:
            content = [self._owner.told_logprobs(token) for token in piece.tokens]
            if not self._owner.stream:
                self._logprobs.extend(content)
            logprobs = {"content": content}
        told = self._owner.told(piece)
        if not self._owner.stream:
            self._told.add(told)
        calls = [] if self._reader is None else self._reader.calls
        if self._n_told:  # text stands behind the last call
            yield from self._tell_call(calls, len(self._n_told) - 1)
        if thought or text or logprobs or told:
            yield Delta(thought, text, logprobs=logprobs, told=told)
        for n in range(len(self._n_told), len(calls)):
            yield from self._tell_call(calls, n)
        if piece.finish is not None:
            self._finish = self._finish_of(piece.finish, calls)
            yield Delta(finish=self._finish)

    def _read(self, piece: Piece) -> tuple[str, str]:
        """What a piece adds to the thoughts, and to the text. A piece may hold the end of the thoughts and more, so its
        tokens are read one by one, and counted."""
        reader = self._thoughts
        if reader is None:
            return "", piece.text
        parts = []
        for token in piece.tokens:
            self._n_read += 1
            was_open = reader.is_open
            parts.append(reader.add(token.text))
            if was_open or parts[-1][0] or reader.is_open:
                self.n_thought = self._n_read
        if piece.finish is not None:
            self.n_thought = piece.n_tokens if reader.is_open else self.n_thought  # with those of a stop string
            parts.append(reader.end())
        return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)

    def _finish_of(self, finish: str, calls: Sequence[Call]) -> str:
        """The reason of the end, as clients read it: with any other word than `length`, they take calls for whole."""
        if not all(call.is_whole for call in calls):
            return "length"
        called = "function_call" if self._is_older else "tool_calls"
        return called if calls and finish == "stop" else finish

    def _tell_call(self, calls: Sequence[Call], n: int) -> Iterable[Delta]:
        """What is new of a call."""
        is_new = n == len(self._n_told)
        self._n_told += [0] if is_new else []
        more = calls[n].arguments[self._n_told[n] :]
        self._n_told[n] += len(more)
        if is_new or more:
            yield Delta(call=calls[n]._replace(arguments=more), place=n, begins=is_new)

    def whole(self) -> dict[str, Any]:
        """The choice of a response."""
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if any(self._thought):
            message["reasoning_content"] = "".join(self._thought)
        if self._reader is not None and self._reader.calls:
            message["content"] = text if text.strip() else None
            calls = [_call_of(call) for call in self._reader.calls]
            message.update({"function_call": calls[0]["function"]} if self._is_older else {"tool_calls": calls})
        logprobs = None if self._logprobs is None else {"content": self._logprobs}
        out = {"index": self._i, "message": message, "logprobs": logprobs, "finish_reason": self._finish}
        return {**out, **self._told.whole()}


def _event(
    i: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None, **more: Any
) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}


def _call_of(call: Call) -> dict[str, Any]:
    """A call, as a message has it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
