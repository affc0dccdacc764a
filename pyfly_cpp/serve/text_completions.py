"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Piece, Token, completion_logprobs, prompt_tokens
from pyfly_cpp.serve.answers import Event, Shared, Told, read_format
from pyfly_cpp.serve.api_errors import bad_request
from pyfly_cpp.serve.requests import CompletionRequest, listed
from pyfly_cpp.serve.served_model import Model
from pyfly_cpp.serve.settings import Settings
from pyfly_cpp.serve.streams import Entries

_DEFAULT_TOKENS = 16  # the protocol's own
_N_AT_ONCE = 256
"""Tokens whose log-probabilities are objects at a time: as JSON they are much smaller."""


class TextAnswer(Shared):
    """A text completion: n for each prompt."""

    kind = chunk_kind = "text_completion"

    def __init__(self, model: Model, settings: Settings, body: CompletionRequest, decoding: Decoding) -> None:
        super().__init__(model, settings, body, decoding)
        self.echoes = bool(body.echo)
        if (body.best_of or 1) > self.n:
            raise bad_request("best_of is not served; leave it out, or ask for n answers and choose.", "best_of")
        self._texts: list[str] = []
        self._given = listed(body.prompt)
        self.require_few(len(self._given))  # before they are read
        prompts = [self._prompt(prompt, body.suffix) for prompt in self._given]
        max_tokens = self.most_tokens(_DEFAULT_TOKENS)
        grammar = read_format(body)
        self.ask(prompts, max_tokens, [], grammar, body.logprobs, self.echoes and body.logprobs is not None)
        self._choices = [_Choice(self, i) for i in range(len(self.requests))]

    def _prompt(self, prompt: Any, suffix: str | None) -> list[int]:
        if suffix and not isinstance(prompt, str):
            raise bad_request("suffix needs a prompt that is a string.", "suffix")
        model = self.model
        if suffix:
            tokens = model.infill(model.plain_tokens(prompt), model.plain_tokens(suffix))
        else:
            tokens = model.read(prompt, "prompt")
        is_text = isinstance(prompt, str)
        self._texts.append(prompt if is_text else self.model.text(tokens, special=True) if self.echoes else "")
        return tokens

    def given(self, i: int) -> Any:
        """The prompt of choice i, as the request has it."""
        return self._given[i // self.n]

    def prompt_text(self, i: int) -> str:
        """The text of the prompt of choice i."""
        return self._texts[i // self.n]

    def begin(self) -> Iterable[Event]:
        """None."""
        return ()

    def take(self, i: int, piece: Piece) -> Iterable[Event]:
        """One for each piece."""
        yield self.chunk([self._choices[i].add(piece)], **self.told_times(i))

    def whole(self) -> Event:
        """All choices."""
        return self.response([choice.whole() for choice in self._choices])


class _Choice:
    """One text of the answer."""

    def __init__(self, owner: TextAnswer, i: int) -> None:
        self._owner = owner
        self._i = i
        self._echo = owner.echoes
        self._request = owner.requests[i]
        self._has_begun = False
        self._text: list[str] = []
        self._logprobs: dict[str, Entries] | None = None if self._request.n_logprobs is None else {}
        self._n_chars = len(owner.prompt_text(i)) if isinstance(owner.given(i), str) else 0
        self._finish: str | None = None
        self._told = Told()

    def add(self, piece: Piece) -> dict[str, Any]:
        """The choice of an event."""
        text, logprobs = piece.text, None
        if not self._has_begun:
            self._has_begun = True
            text = self._owner.prompt_text(self._i) + text if self._echo else text
        if self._logprobs is not None:
            logprobs = self._tell(piece)
        self._finish = piece.finish
        told = self._owner.told(piece)
        if not self._owner.stream:
            for name, values in (logprobs or {}).items():
                assert self._logprobs is not None
                self._logprobs.setdefault(name, Entries()).extend(values)
            self._text.append(text)
            self._told.add(told)
        return {"index": self._i, "text": text, "logprobs": logprobs, "finish_reason": piece.finish, **told}

    def whole(self) -> dict[str, Any]:
        """The choice of a response."""
        out = {
            "index": self._i, "text": "".join(self._text), "logprobs": self._logprobs, "finish_reason": self._finish,
        }  # fmt: skip
        return {**out, **self._told.whole()}

    def _tell(self, piece: Piece) -> dict[str, Entries]:
        model, tokens = self._owner.model, list[Token]()
        if piece.prompt is not None:
            self._n_chars = 0
            tokens = prompt_tokens(
                self._request.prompt, lambda token: model.vocabulary.piece(token, True), piece.prompt
            )
            given = self._owner.given(self._i)
            has_own = isinstance(given, list) and not isinstance(given[0], str)
            if not has_own and [token.id for token in tokens[:1]] == model.own_beginning():  # we put it there
                del tokens[0]
        tokens += piece.tokens
        out: dict[str, Entries] = {}
        for i in range(0, len(tokens) or 1, _N_AT_ONCE):
            some = tokens[i : i + _N_AT_ONCE]
            told = completion_logprobs(some, self._n_chars, lambda token: model.text([token], special=True))
            for name, values in told.items():
                out.setdefault(name, Entries()).extend(values)
            self._n_chars += sum(len(token.text) for token in some)
        return out
