"""A text while it is written, in a thread of the batch: from tokens to pieces of text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import LlamaGrammar
from llama_cpp.llama import LogitsProcessorList

from pyfly_cpp.errors import ContextFullError
from pyfly_cpp.request import Request
from pyfly_cpp.serve.orders import Order
from pyfly_cpp.stats import Record, Stats
from pyfly_cpp.views import View

Logprobs = tuple[float, list[tuple[int, float]]]
"""ln p of a token, and the most probable tokens with theirs."""


class Token(NamedTuple):
    """A token of a text."""

    id: int
    logprobs: Logprobs | None = None
    record: Record | None = None


class Piece(NamedTuple):
    """What a text has grown by."""

    text: str
    tokens: tuple[Token, ...] = ()
    """Those that the text comes of, and those before them that gave none."""
    n_tokens: int = 0
    """Of the text so far, those of a stop text included, an end-of-text token not."""
    finish: str | None = None
    """Of the last piece: `"stop"` or `"length"`."""
    prompt: tuple[Logprobs, ...] | None = None
    """Of the first piece, if the request wants them: of the prompt's tokens from the second on."""
    stats: Stats | None = None
    """Of the last piece: what was counted."""


class Cutter:
    """Cuts a text at the first stop text; holds back what may be the beginning of one, or of a character."""

    def __init__(self, stop: Sequence[bytes]) -> None:
        self._stop = stop
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self.n_given = 0
        """Bytes that were let through."""

    def add(self, piece: bytes) -> tuple[str, bool]:
        """What can be let through now, and whether the text ends with it."""
        self._held += piece
        found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        if found:
            return self._give(min(found), True), True
        return self._give(len(self._held) - self._n_suspicious(), False), False

    def end(self) -> str:
        """The rest of a text that ends by itself."""
        return self._give(len(self._held), True)

    def _give(self, n: int, is_last: bool) -> str:
        given, self._held = self._held[:n], self._held[n:]
        self.n_given += n
        return self._decoder.decode(given, is_last)

    def _n_suspicious(self) -> int:
        """Bytes at the end that may be the beginning of a stop text."""
        most = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(self._held)), most, -1):
                if self._held.endswith(stop[:n]):
                    most = n
                    break
        return most


def write(
    llm: View,
    order: Order,
    piece_of: Callable[[int], bytes],
    is_end: Callable[[int], bool],
    is_late: Callable[[], bool],
) -> Iterator[Piece]:
    """Writes the text of an order.

    Args:
        llm: The request's own, configured.
        piece_of: The bytes of a token.
        is_end: Whether a token ends the text.
        is_late: Asked after each token: whether the text ends with it, because its time is over.

    Yields:
        Pieces; the last one has `finish`.

    Raises:
        ContextFullError: the prompt does not fit. A text that fills the context ends with `"length"`.
        ValueError: the rule or the sampling cannot be.
    """
    llm._warn_if_strict = lambda: None  # type: ignore[method-assign]  # strangers' settings are no news to stderr
    request = Request(max(1, order.max_tokens), order.n_logprobs, order.echo)
    stream = llm.tokens(order.prompt, request, **_sampling(order))
    cutter = Cutter(order.stop)
    held: list[tuple[int, Token]] = []  # with the bytes before each
    n_tokens = n_bytes = 0
    prompt: tuple[Logprobs, ...] | None = None

    def made(text: str, finish: str | None = None, is_cut: bool = False) -> Piece:
        nonlocal prompt
        # What a stop text cut off is none of the answer's.
        tokens = tuple(token for place, token in held if not is_cut or place < cutter.n_given)
        held.clear()
        told, prompt = prompt, None
        return Piece(text, tokens, n_tokens, finish, told, None if finish is None else llm.stats)

    try:
        for token in stream:
            if n_tokens == 0 and request.prompt_logprobs is not None:
                prompt = tuple(request.prompt_logprobs.entries[: len(order.prompt) - 1])
            if order.max_tokens == 0:
                yield made("", "length")
                return
            if is_end(token):
                text = cutter.end()
                yield made(text, "stop")
                return
            n_tokens += 1
            logprobs = None if request.logprobs is None else request.logprobs.entries[-1]
            held.append((n_bytes, Token(token, logprobs, llm.records[-1] if order.records else None)))
            piece = piece_of(token)
            n_bytes += len(piece)
            text, ends = cutter.add(piece)
            if ends:
                yield made(text, "stop", is_cut=True)
                return
            if is_late() or n_tokens >= order.max_tokens:
                text += cutter.end()
                yield made(text, "length")
                return
            if text:
                yield made(text)
    except ContextFullError:
        if n_tokens == 0:
            raise
        text = cutter.end()
        yield made(text, "length")
    finally:
        stream.close()


def _sampling(order: Order) -> dict[str, Any]:
    sampling = dict(order.sampling)
    if order.logit_bias:
        ids = np.array([token for token, _ in order.logit_bias], dtype=np.intp)
        bias = np.array([bias for _, bias in order.logit_bias], dtype=np.single)

        def add_bias(_: Any, scores: Any) -> Any:
            scores[ids] += bias
            return scores

        sampling["logits_processor"] = LogitsProcessorList([add_bias])
    if order.grammar is not None:
        sampling["grammar"] = LlamaGrammar.from_string(order.grammar.text, verbose=False)
    return sampling
