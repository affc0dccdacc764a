"""From committed tokens to text: the one machine behind completions, the server and evaluation.

The text of an answer is that of its tokens, decoded as UTF-8; bytes that are no UTF-8 are left out, a character that
the answer ends in the middle of among them. A character belongs to the token that completes it.

An answer ends by the first of these, which `Output.cause` names:

- `"eog"`: an end-of-text token. It has no text and is not counted.
- `"stop"`: the text contains a stop string. The text ends where the first one begins: of several that a token
  completes, the earliest in the text counts, wherever it stands in the list. The tokens of the stop string are counted,
  but not told.
- `"length"`: there are `max_tokens` tokens, never more; a stop string in the last one still counts. Or a line has
  ended, `line_seconds` or more after the first token.
- `"loop"`: it repeats itself, and the request asks that such an answer is stopped (`LoopWatch`).
- `"context"`, or any of them: the caller ends it (`Output.end`).

A piece of text is given out as soon as no stop string can begin in it, in whole tokens: the text of a piece is that of
its tokens. What was held back is given out at the end, so that the pieces together are the answer, however they came.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyfly_cpp.engine.repetition import LoopWatch
from pyfly_cpp.engine.stats import Record, Stats

Row = npt.NDArray[np.float32]
Logprobs = tuple[float, list[tuple[int, float]]]
"""ln p of a token, and (token id, ln p) of the most probable tokens, by falling probability."""

FINISH = {"eog": "stop", "stop": "stop", "length": "length", "context": "length", "loop": "length"}
"""The words of a response for the causes of an end."""

_BLOCK = 256


class Token(NamedTuple):
    """A token of an answer."""

    id: int
    text: str = ""
    """The characters that it completes, as far as they belong to the answer."""
    logprobs: Logprobs | None = None
    record: Record | None = None


class Piece(NamedTuple):
    """A piece that an answer has grown by."""

    text: str
    tokens: tuple[Token, ...] = ()
    """Those that the text consists of, and those between them that completed no character."""
    n_tokens: int = 0
    """Tokens of the answer so far, those of a stop string included."""
    finish: str | None = None
    """`"stop"` or `"length"` in the last piece, None before."""
    cause: str | None = None
    """Why the answer has ended, in the last piece: a key of `FINISH`."""
    stop_string: str = ""
    """The stop string that has ended it, in the last piece."""
    prompt: tuple[Logprobs, ...] | None = None
    """Log-probabilities of the prompt's tokens from the second on, for the first piece."""
    stats: Stats | None = None
    """The counters, for the last piece."""


class Characters:
    """The characters that each token of a sequence completes."""

    def __init__(self, piece_of: Callable[[int], bytes]) -> None:
        """`piece_of`: the bytes of a token, behind those that it was called for before."""
        self._piece_of = piece_of
        self._decode = codecs.getincrementaldecoder("utf-8")("ignore").decode

    def __call__(self, token: int) -> str:
        return self._decode(self._piece_of(token))


def whole_characters(tokens: Sequence[Token], piece_of: Callable[[int], bytes]) -> list[Token]:
    """The tokens up to the last one that ends a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    n = 0
    for i, token in enumerate(tokens):
        decoder.decode(piece_of(token.id))
        n = n if decoder.getstate()[0] else i + 1
    return list(tokens[:n])


class Output:
    """The text of one answer; see the module for the rules."""

    def __init__(
        self,
        piece_of: Callable[[int], bytes],
        is_end: Callable[[int], bool],
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        n_logprobs: int | None = None,
        line_seconds: float | None = None,
        stops_loops: bool = False,
    ) -> None:
        """
        Args:
            piece_of: The bytes of a token.
            is_end: Whether a token is an end-of-text token.
            stop: Strings that the text ends before. Empty ones are ignored.
            max_tokens: Most tokens, 0: the answer ends before its first one; None: no limit.
            n_logprobs: Most probable tokens to name for each token, >= 0; None: no log-probabilities.
            line_seconds: Seconds after the first token, from which on the end of a line ends the answer; None: no
                limit.
            stops_loops: Whether an answer that repeats itself is ended.
        """
        self._characters = Characters(piece_of)
        self._is_end = is_end
        self._stop = tuple(sorted({string for string in stop if string}))
        self._line_seconds = line_seconds
        self._watch = LoopWatch() if stops_loops else None
        self._begun: float | None = None
        self.max_tokens = max_tokens
        self.n_logprobs = n_logprobs
        self._held: list[Token] = []
        self._text = ""  # of the held tokens
        self.n_tokens = 0
        """Tokens so far, an end-of-text token not counted."""
        self.cause: str | None = None
        """Why the answer has ended, a key of `FINISH`; None while it continues."""

    def add(self, token: int, row: Row | None = None, record: Record | None = None) -> Piece:
        """Takes a committed token; the piece has `finish` if the answer ends with it, and is empty if nothing can be
        given out yet.

        Args:
            row: The logits [n_vocab] that the token was chosen by; needed for log-probabilities.
            record: How it was produced; kept with the token.
        """
        if self.max_tokens == 0:
            return self.end("length")
        if self._is_end(token):
            return self.end("eog")
        self.n_tokens += 1
        self._begun = time.monotonic() if self._begun is None else self._begun
        text = self._characters(token)
        logprobs = None if self.n_logprobs is None or row is None else logprobs_of(row, token, self.n_logprobs)
        self._held.append(Token(token, text, logprobs, record))
        self._text += text
        found = [(place, stop) for stop in self._stop if (place := self._text.find(stop)) >= 0] if text else []
        if found:
            place, stop = min(found)
            return self._end("stop", self._before(place))._replace(stop_string=stop)
        if self.n_tokens == self.max_tokens or ("\n" in text and self._is_late()):
            return self.end("length")
        if self._watch is not None and self._watch.add(token):
            return self.end("loop")
        return self._give(self._certain(len(self._text) - self._n_doubtful())) if text else Piece("", (), self.n_tokens)

    def _is_late(self) -> bool:
        limit, begun = self._line_seconds, self._begun
        return limit is not None and begun is not None and time.monotonic() - begun >= limit

    def end(self, cause: str) -> Piece:
        """Ends the answer where it stands: the last piece, with all that was held back. `cause`: a key of `FINISH`."""
        return self._end(cause, self._held)

    def _end(self, cause: str, tokens: list[Token]) -> Piece:
        self.cause = cause
        return self._give(tokens)._replace(finish=FINISH[cause], cause=cause)

    def _give(self, tokens: list[Token]) -> Piece:
        text = "".join(token.text for token in tokens)
        if not text and self.cause is None:
            return Piece("", (), self.n_tokens)
        self._held = self._held[len(tokens) :]
        self._text = self._text[len(text) :]
        return Piece(text, tuple(tokens), self.n_tokens)

    def _n_doubtful(self) -> int:
        """Characters at the end that may be the beginning of a stop string. Takes no longer if there are many: all
        requests wait for it at each token."""
        for n in range(min(max(map(len, self._stop), default=0), len(self._text)), 0, -1):
            tail = self._text[-n:]
            place = bisect.bisect_left(self._stop, tail)
            if place < len(self._stop) and self._stop[place].startswith(tail):
                return n
        return 0

    def _certain(self, n: int) -> list[Token]:
        """The held tokens that end within the first n characters."""
        end = 0
        for i, token in enumerate(self._held):
            end += len(token.text)
            if end > n:
                return self._held[:i]
        return list(self._held)

    def _before(self, n: int) -> list[Token]:
        """The held tokens that begin within the first n characters, as far as these go."""
        out: list[Token] = []
        for token in self._held:
            if n <= 0:
                break
            out.append(token._replace(text=token.text[:n]))
            n -= len(token.text)
        return out


def logprobs_of(row: Row, token: int, n_top: int) -> Logprobs:
    """Reduces the logits [n_vocab] that a token was chosen by to what a response shows of them. Other requests wait for
    it, at each token of an echoed prompt."""
    peak = row.max()
    log_sum = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    return float(row[token]) - log_sum, [(i, float(row[i]) - log_sum) for i in _largest(row, n_top)]


def _largest(row: Row, n: int) -> list[int]:
    """The places of the n largest numbers, by falling number."""
    if n <= 0:
        return []
    n_blocks = row.shape[0] // _BLOCK
    least = -np.inf
    if n_blocks > n:  # the n blocks with the largest peaks have n numbers as large as the least of those peaks
        peaks = row[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
        least = np.partition(peaks, -n)[-n]
    candidates = np.flatnonzero(row >= least)
    order = np.argsort(-row[candidates], kind="stable")[:n]
    places: list[int] = candidates[order].tolist()
    return places


def prompt_tokens(tokens: Iterable[int], piece_of: Callable[[int], bytes], logprobs: Sequence[Logprobs]) -> list[Token]:
    """The tokens of a prompt, as a response that echoes it shows them. `logprobs`: of those from the second on, as many
    as were read."""
    characters = Characters(piece_of)
    of_each = itertools.chain([None], logprobs, itertools.repeat(None))
    return [Token(token, characters(token), own) for token, own in zip(tokens, of_each)]


def completion_logprobs(tokens: Iterable[Token], offset: int, text_of: Callable[[int], str]) -> dict[str, list[Any]]:
    """The `logprobs` of a completion, as OpenAI's protocol lays them out.

    Args:
        tokens: What they are of.
        offset: Characters before the first token.
        text_of: The text of a token alone, for those with log-probabilities; of several with one text the most
            probable counts.
    """
    out: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for token in tokens:
        out["tokens"].append(token.text)
        out["text_offset"].append(offset)
        offset += len(token.text)
        own: float | None = None
        named: dict[str, float] | None = None
        if token.logprobs is not None:
            own, named = token.logprobs[0], {}
            for other, logprob in token.logprobs[1]:
                named.setdefault(text_of(other), logprob)
            whole = text_of(token.id)  # a stop string may have cut it
            named[whole if whole.startswith(token.text) else token.text] = own
        out["token_logprobs"].append(own)
        out["top_logprobs"].append(named)
    return out
