"""/completion and /infill: the routes of llama.cpp's own server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece, Token
from pyfly_cpp.serve.answer_requests import AnswerRequest, settings_of
from pyfly_cpp.serve.answers import Event, Shared, Told, read_format
from pyfly_cpp.serve.api_errors import ApiError, not_supported
from pyfly_cpp.serve.requests import ExtraFields, InfillRequest, NativeRequest, listed
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.streams import Entries
from pyfly_cpp.serve.timings import Progress

_NEAR = 2048
_MOST_CHARACTERS = 16
"""Characters that are read for each token that there is room for."""
_PROJECT, _FILE = "project\n", "file\n"
"""The names that are written for the project, and for the file with the gap."""
_STOP_TYPES = {"eog": "eos", "stop": "word", "length": "limit", "context": "limit", "loop": "limit"}


class Native(Shared):
    """A completion as llama.cpp's server tells it."""

    kind = "completion"
    is_marked = False
    tells_ids = True

    def __init__(self, model: Model, settings: Settings, body: NativeRequest, decoding: Decoding) -> None:
        super().__init__(model, settings, body, decoding)
        self._max_tokens = self.most_tokens(settings.default_max_tokens or -1)
        grammar = read_format(body)
        self.ask(self._prompts(body), self._max_tokens, [], grammar, body.n_probs or None)
        self.returns_tokens, self.wanted_fields = bool(body.return_tokens), body.response_fields
        self._texts = [_Text(self, i, request) for i, request in enumerate(self.requests)]

    def _prompts(self, body: NativeRequest) -> list[list[int]]:
        given = listed(body.prompt)
        self.require_few(len(given))
        return [self.model.read(one, "prompt") for one in given]

    def begin(self) -> Iterable[Event]:
        """None."""
        return ()

    def add(self, i: int, piece: Piece | Progress) -> Iterable[Event]:
        """The events of `Shared`, with the fields that all events have."""
        for event in super().add(i, piece):
            yield {"index": i, **event}

    def take(self, i: int, piece: Piece) -> Iterable[Event]:
        """One for each piece, and one for the end."""
        text = self._texts[i]
        if piece.tokens or piece.text:
            yield {**text.add(piece), "stop": False, **self.told_times(i)}
        if piece.finish is not None:
            text.last = piece._replace(text="", tokens=())
            yield text.final()

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> Event:
        """An event before the first piece."""
        return {"content": "", "tokens": [], "stop": False, **more}

    def end(self) -> Iterable[Event]:
        """None."""
        return ()

    def whole(self) -> Any:
        """The only text, or a list of all."""
        out = [text.whole() for text in self._texts]
        return out if len(out) > 1 else out[0]


class Infill(Native):
    """A completion between two texts."""

    def _prompts(self, body: NativeRequest) -> list[list[int]]:
        assert isinstance(body, InfillRequest)
        try:
            return [infill_prompt(self.model, body, self._max_tokens)]
        except ApiError as error:
            raise not_supported(error.message) if error.param == "suffix" else error from None


class _Text:
    """One text of the answer."""

    def __init__(self, owner: Native, i: int, request: AnswerRequest) -> None:
        self._owner = owner
        self._i = i
        self._request = request
        self._text: list[str] = []
        self._ids, self._all_probabilities, self._records = Entries(), Entries(), Told()
        self.last = Piece("")
        """The last piece, without its text."""

    def add(self, piece: Piece) -> dict[str, Any]:
        """The fields of a piece's event that a response also has."""
        self._text.append(piece.text)
        told = self._told(piece)
        if not self._owner.stream:
            self._ids.extend(told["tokens"])
            self._all_probabilities.extend(told.get("completion_probabilities", ()))
            self._records.add(told)
        return told

    def whole(self) -> dict[str, Any]:
        """The response."""
        out = {**self.final(), "content": "".join(self._text)}
        if self._owner.returns_tokens:
            out["tokens"] = self._ids
        if "completion_probabilities" in out:
            out["completion_probabilities"] = self._all_probabilities
        self._records.add(out)
        out.update(self._records.whole())
        wanted = self._owner.wanted_fields
        return {path: value for path in wanted if (value := _at(out, path)) is not None} if wanted else out

    def _told(self, piece: Piece) -> dict[str, Any]:
        return {
            "content": piece.text, "tokens": [token.id for token in piece.tokens],
            "tokens_predicted": self._owner.n_tokens[self._i], "tokens_evaluated": len(self._request.prompt),
            **self._probabilities(piece.tokens), **self._owner.told(piece),
        }  # fmt: skip

    def final(self) -> dict[str, Any]:
        """The last event: all of it but text and tokens."""
        owner, request, last = self._owner, self._request, self.last
        n_all = len(request.prompt) + owner.n_tokens[self._i]
        return {
            **self._told(last), "index": self._i, "stop": True, "model": owner.settings.name,
            "prompt": owner.model.text(request.prompt, True),
            "generation_settings": self._settings(), "has_new_line": any("\n" in text for text in self._text),
            "truncated": last.finish == "length" and n_all >= owner.model.batch.n_ctx,
            "stop_type": _STOP_TYPES[last.cause or "eog"], "stopping_word": last.stop_string, "tokens_cached": n_all,
            "timings": owner.timings[self._i].as_dict(),
        }  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        request = self._request
        return {
            **settings_of(request.sampling), "seed": request.seed, "n_predict": request.max_tokens,
            "mirostat": request.sampling.get("mirostat_mode", 0),
            "max_tokens": request.max_tokens, "stop": list(request.stop), "stream": self._owner.stream,
            "n_probs": request.n_logprobs or 0, "grammar": "" if request.grammar is None else request.grammar.text,
            "ignore_eos": bool(self._owner.body.ignore_eos),
            "logit_bias": [{"token": token, "bias": bias if math.isfinite(bias) else None}
                           for token, bias in request.logit_bias],
        }  # fmt: skip

    def _probabilities(self, tokens: Iterable[Token]) -> dict[str, Any]:
        if self._request.n_logprobs is None:
            return {}
        told = [self._owner.told_logprobs(token) for token in tokens if token.logprobs is not None]
        return {"completion_probabilities": told}


def _at(value: Any, path: str) -> Any:
    """The entry at a/b/c of objects within each other; None if there is none."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def infill_prompt(model: Model, body: InfillRequest, n_answer: int | None) -> list[int]:
    """The tokens of the prompt of /infill: the text before a gap, the text after it, and pieces of other files, cut as
    llama.cpp's server cuts them: an editor sends what it has, and asks again at every key.

    Of 2,048 tokens, or as many as there is room for, the end of the prefix gets three quarters, and the beginning of
    the suffix one, less the text that the answer continues. The end of the other pieces gets what the context has left,
    less twice the answer.

    Args:
        body: Of the request.
        n_answer: Most tokens of the answer; None: as many as there is room for.

    Raises:
        ApiError: the model cannot fill in.
    """
    n_ctx = model.batch.n_ctx
    room = max(2, n_ctx // 4 if n_answer is None else min(n_answer, n_ctx // 4))
    near = max(0, min(_NEAR, n_ctx - room - 2))  # without a token to begin with, and the last one
    begun = model.plain_tokens(body.prompt or "")
    n_prefix, n_suffix = 3 * (near // 4), max(0, near // 4 - 2 - len(begun))
    before = _end(model, body.input_prefix, n_prefix)
    behind = model.plain_tokens(body.input_suffix[: _MOST_CHARACTERS * n_suffix])[:n_suffix]
    others = _others(model, body.input_extra or [], max(0, n_ctx - near - 2 * room))
    return model.infill([*before, *begun], behind, others)


def _end(model: Model, text: str, n: int) -> list[int]:
    return model.plain_tokens(text[-_MOST_CHARACTERS * n :])[-n:] if n > 0 else []


def _others(model: Model, pieces: Sequence[ExtraFields], n: int) -> list[int]:
    """The last n tokens of the pieces of other files, as models with tokens for that were trained on them."""
    if not pieces or n <= 0:
        return []
    repository, file = model.vocabulary.project_tokens()
    mark = [file] if file >= 0 else []
    out = [*mark, *model.plain_tokens(_FILE)] if mark else []
    for piece in reversed(pieces):
        if len(out) >= n:
            break
        name, text = piece.filename or "", f"{piece.text}\n"
        out = [*mark, *model.plain_tokens(f"{name}\n"), *_end(model, text, n), *out]
    begun = [repository, *model.plain_tokens(_PROJECT)] if repository >= 0 else []
    return [*begun, *out][-n:]
