"""Common parts of answers of all routes: an `Answer` has understood a request, and makes its response of pieces."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from pyfly_cpp._version import __version__
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece, Token
from pyfly_cpp.grammar.response_format import schema_of
from pyfly_cpp.grammar.schemas import Framed
from pyfly_cpp.serve.answer_requests import (
    AnswerRequest,
    read_logit_bias,
    read_sampling,
    read_seeds,
    read_stop,
    written,
)
from pyfly_cpp.serve.api_errors import ApiError, bad_request
from pyfly_cpp.serve.grammars import Constraint
from pyfly_cpp.serve.requests import NumberedFields
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.streams import Entries
from pyfly_cpp.serve.timings import Progress, Timings

Event = dict[str, Any]

_MOST_TOLD = 2**20
"""Log-probabilities of the prompts of a request, which are held until they are sent: some 50 MB."""


class Answer(Protocol):
    """A request that was understood. It is fed with pieces; the answer is the same event by event and as a whole."""

    requests: list[AnswerRequest]
    """One for each text that it wants."""
    stream: bool
    """Whether it wants events."""
    tells_progress: bool
    """Whether events tell how far a prompt is."""
    is_named: bool
    """Whether the events have names (their `type`)."""
    is_marked: bool
    """Whether [DONE] stands behind the events."""
    headers: dict[str, str]
    """Headers of the response."""

    def begin(self) -> Iterable[Event]:
        """Events before the first piece."""

    def add(self, i: int, piece: Piece | Progress) -> Iterable[Event]:
        """Takes a piece of text i, or how far its prompt is; the events that tell it."""

    def end(self) -> Iterable[Event]:
        """Events behind the last piece."""

    def fail(self, failure: ApiError) -> Event:
        """The event instead of what would have come."""

    def whole(self) -> Event:
        """The response, when all pieces have been taken."""


class Shared:
    """Common parts of the completions of all protocols."""

    is_named = False
    is_marked = True
    kind = ""
    chunk_kind = ""
    tells_ids = False
    """Whether log-probabilities have the ids of their tokens."""

    def __init__(self, model: Model, settings: Settings, body: NumberedFields, decoding: Decoding) -> None:
        self.model = model
        self.settings = settings
        self.body = body
        self.decoding = decoding
        self.n = body.n or 1
        """Answers to each prompt."""
        self.stream = bool(body.stream)
        self.tells_progress = bool(body.return_progress)
        self.with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self.with_records = bool(body.records)
        self.requests: list[AnswerRequest] = []
        self.headers: dict[str, str] = {}
        self.n_prompt_tokens = 0
        self.n_tokens: dict[int, int] = {}
        self.timings: list[Timings] = []
        self.id = f"{'chatcmpl' if self.kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.system_fingerprint = system_fingerprint(written(decoding))

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | None, stop: list[str], grammar: Constraint | None,
        n_logprobs: int | None, echo: bool = False, new_processor: Callable[[], Any] | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Asks for n answers to each prompt. Raises ApiError: that cannot be."""
        body, limits = self.body, self.settings.limits
        self.require_few(len(prompts))
        if echo and n_logprobs is not None:
            n_told = self.n * sum(map(len, prompts)) * (n_logprobs + 1)
            if n_told > _MOST_TOLD:
                raise bad_request(
                    f"the prompts would have {n_told} log-probabilities; at most {_MOST_TOLD} are told. Send fewer "
                    "prompts, or ask for fewer.", "logprobs"
                )  # fmt: skip
        n_batch = self.model.n_batch
        k = self.decoding.draft_max
        if k is not None and k >= n_batch:
            raise bad_request(f"draft_max must be less than {n_batch}, not {k}.", "draft_max")
        sampling = read_sampling(body, self.settings.sampling)
        model = self.model
        texts_of_stop = read_stop(body.stop, stop)
        forbidden = model.ends if body.ignore_eos else ()
        bias = read_logit_bias(body, model.n_vocab, lambda text: model.tokenize(text, False, False), forbidden)
        seeds = read_seeds(body.seed, self.n, self.settings.seed)
        milliseconds = body.t_max_predict_ms or 0
        line_seconds = milliseconds / 1e3 if milliseconds > 0 else None
        for prompt in prompts:
            room = _require_room(prompt, self.model)
            self.n_prompt_tokens += len(prompt)
            most = min(room, limits.max_tokens if max_tokens is None else min(max_tokens, limits.max_tokens))
            self.requests += [
                AnswerRequest(
                    tuple(prompt), most, sampling, seed, texts_of_stop, bias, grammar, n_logprobs, echo,
                    self.with_records, self.decoding, new_processor=new_processor, shown=shown,
                    line_seconds=line_seconds, stops_loops=bool(body.stop_loops),
                )
                for seed in seeds
            ]  # fmt: skip
        self.timings = [Timings() for _ in self.requests]

    def most_tokens(self, default: int) -> int | None:
        """The longest answer that the request asks for; None: as the context allows."""
        n = default if self.body.most_tokens is None else self.body.most_tokens
        return None if n < 0 else n

    def require_few(self, n_prompts: int) -> None:
        """Raises ApiError: with so many prompts the request asks for too many answers."""
        most = self.settings.limits.max_answers
        if self.n * n_prompts > most:
            raise bad_request(f"the request asks for {self.n * n_prompts} answers; at most {most} are allowed.", "n")

    def note(self, i: int, piece: Piece | Progress) -> dict[str, Any]:
        """Takes note of tokens and times; the fields of an event that tell how far the prompt is, if it is to tell."""
        self.timings[i].add(piece)
        if isinstance(piece, Piece):
            self.n_tokens[i] = piece.n_tokens
            return {}
        if not self.tells_progress:
            return {}
        return {"prompt_progress": self.timings[i].progress(), **self.told_times(i)}

    def add(self, i: int, piece: Piece | Progress) -> Iterable[Event]:
        """Takes note of tokens and times, and hands pieces on to `take`."""
        progress = self.note(i, piece)
        if isinstance(piece, Piece):
            yield from self.take(i, piece)
        elif progress:
            yield self.chunk([], **progress)

    def take(self, i: int, piece: Piece) -> Iterable[Event]:
        """Takes a piece of text i; the events that tell it."""
        raise NotImplementedError

    def told_times(self, i: int) -> dict[str, Any]:
        """The field `timings` of an event, if events are to have it."""
        return {"timings": self.timings[i].as_dict()} if self.body.timings_per_token else {}

    def usage(self) -> dict[str, Any]:
        """The tokens of all prompts, each once, and of all answers."""
        n = sum(self.n_tokens.values())
        return {
            "prompt_tokens": self.n_prompt_tokens,
            "completion_tokens": n,
            "total_tokens": self.n_prompt_tokens + n,
            "prompt_tokens_details": {"cached_tokens": self._n_cached()},
        }

    def _n_cached(self) -> int:
        """Tokens of the prompts that need not have been evaluated for this request, by the first text of each."""
        return sum(timings.n_cached for timings in self.timings[:: self.n])

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> Event:
        """An event of a stream."""
        event = {
            "id": self.id, "object": self.chunk_kind, "created": self.created, "model": self.settings.name,
            "system_fingerprint": self.system_fingerprint, "choices": choices,
        }  # fmt: skip
        return {**event, **({"usage": None} if self.with_usage else {}), **more}

    def end(self) -> Iterable[Event]:
        """The usage, if a client wants it."""
        if self.with_usage:
            yield self.chunk([], usage=self.usage(), timings=self.timings[0].as_dict())

    def fail(self, failure: ApiError) -> Event:
        """The error as it is."""
        return failure.body()

    def response(self, choices: list[dict[str, Any]]) -> Event:
        """All of it."""
        return {
            "id": self.id, "object": self.kind, "created": self.created, "model": self.settings.name,
            "system_fingerprint": self.system_fingerprint, "choices": choices, "usage": self.usage(),
            "timings": self.timings[0].as_dict(),
        }  # fmt: skip

    def told(self, piece: Piece) -> dict[str, Any]:
        """How the tokens of a piece came, and why the answer has ended, as the field `pyfly` of a choice; empty if
        nobody asked."""
        if not self.with_records:
            return {}
        out: dict[str, Any] = {"tokens": [_record_of(token, self.model) for token in piece.tokens]}
        if piece.stats is not None:
            out["stats"] = piece.stats.as_dict()
        if piece.cause is not None:
            out["cause"] = piece.cause
        return {"pyfly": out}

    def told_logprobs(self, token: Token) -> dict[str, Any]:
        """The log-probability of a token, and those of the most probable ones."""
        assert token.logprobs is not None
        own, top = token.logprobs
        return {**self._told_logprob(token.id, own), "top_logprobs": [self._told_logprob(*entry) for entry in top]}

    def _told_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.model.vocabulary.piece(token, True)
        told = {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}
        return {"id": token, **told} if self.tells_ids else told


def system_fingerprint(gate: str) -> str:
    """What decided about the answer: our release, and the gate as it is written, with its window."""
    return f"pyfly-cpp-{__version__}-{gate.replace(' ', '-')}"


def _require_room(prompt: Sequence[int], model: Model) -> int:
    """Tokens of an answer that fit behind a prompt. Raises ApiError: none."""
    room = model.batch.n_ctx - len(prompt)
    if room < 1:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, and with its answer exceeds the available context size of "
            f"{model.batch.n_ctx}; shorten it.",
            code="context_length_exceeded",
            more={"type": "exceed_context_size_error", "n_prompt_tokens": len(prompt), "n_ctx": model.batch.n_ctx},
        )
    return room


def read_format(body: NumberedFields) -> Constraint | None:
    """What the answer must follow: the request's grammar, or its format. Raises ApiError: both, or no schema."""
    given, param = None if body.response_format is None else body.response_format.raw, "response_format"
    if body.json_schema is not None:
        if given is not None:
            raise bad_request(f"give either json_schema or {param}, not both.", "json_schema")
        given, param = {"type": "json_schema", "json_schema": {"schema": body.json_schema}}, "json_schema"
    kind = "text" if given is None else given["type"]
    grammar = body.grammar or None
    if kind == "text":
        return None if grammar is None else Constraint("gbnf", grammar, "grammar")
    if grammar is not None:
        raise bad_request(f"give either grammar or {param}, not both.", "grammar")
    assert given is not None
    try:
        schema = schema_of(given)
    except ValueError as error:
        raise bad_request(str(error), param) from None
    return Constraint("schema", json.dumps([Framed({"type": "object"} if schema is None else schema)]), param)


class Told:
    """The fields `pyfly` of the pieces of one of its requests, as one."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._tokens = Entries()

    def add(self, told: Mapping[str, Any]) -> None:
        """Takes the fields of a piece's event, if `pyfly` is one of them."""
        if "pyfly" in told:
            self._last = told["pyfly"]
            self._tokens.extend(self._last["tokens"])

    def whole(self) -> dict[str, Any]:
        """The field of a response; none if there was none."""
        return {"pyfly": {**self._last, "tokens": self._tokens}} if self._last else {}


def _record_of(token: Token, model: Model) -> dict[str, Any]:
    """How a token came, fit for JSON."""

    def text(token_id: int) -> str:
        return model.vocabulary.piece(token_id, True).decode("utf-8", "replace")

    record = token.record
    if record is None:
        return {"token": token.id, "text": text(token.id)}
    numbers = {name: getattr(record, name) for name in ("entropy", "margin", "logprob")}
    return {
        "token": token.id, "text": text(token.id), "origin": record.origin, "choice": text(record.choice),
        "depth": record.depth, "reason": record.reason, "round": record.round,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "rejected": [text(rejected) for rejected in record.rejected],
    }  # fmt: skip
