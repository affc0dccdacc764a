"""The tokens of a loaded model, one by one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import llama_cpp

from pyfly_cpp.grammar.guides import GuideTokens, tokens_of

_ROOM = 64  # bytes that hold nearly every token


class Vocabulary:
    """The vocabulary of a model as llama.cpp knows it. May be used by any thread."""

    def __init__(self, vocab: Any, reading: Callable[[], AbstractContextManager[None]]) -> None:
        """
        Args:
            vocab: A llama_vocab as llama_cpp holds it (a ctypes pointer).
            reading: A context in which it is not freed; raises ValueError if it was.
        """
        self._vocab = vocab
        self._reading = reading
        self._n: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._guide_tokens: GuideTokens | None = None
        self._making = threading.Lock()

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token, which may be a part of a character; of a control token nothing, unless `special`.
        Raises ValueError: it is no token."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self._n:
                raise ValueError(
                    f"token {token} is outside the vocabulary of {self._n}; the last one is {self._n - 1}."
                )
            n_room, n = 0, _ROOM
            with self._reading():
                while n > n_room:  # at most twice: llama.cpp answers with the size, negative, if there is no room
                    n_room = n
                    buffer = ctypes.create_string_buffer(n_room)
                    n = abs(llama_cpp.llama_token_to_piece(self._vocab, token, buffer, n_room, 0, special))
            piece = self._pieces[token, special] = buffer.raw[:n]
        return piece

    def guide_tokens(self) -> GuideTokens:
        """The vocabulary as llguidance takes it; made once, which takes a second for a large one."""
        with self._making, self._reading():
            if self._guide_tokens is None:
                self._guide_tokens = tokens_of(self._vocab)
            return self._guide_tokens

    def ends_text(self, token: int) -> bool:
        """Whether a token is an end-of-text token."""
        with self._reading():
            return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def is_control(self, token: int) -> bool:
        """Whether a token stands for no text."""
        with self._reading():
            return bool(llama_cpp.llama_vocab_is_control(self._vocab, token))

    @property
    def adds_bos(self) -> bool:
        """Whether a text is to begin with the token that begins texts."""
        with self._reading():
            return bool(llama_cpp.llama_vocab_get_add_bos(self._vocab))

    def infill_tokens(self) -> tuple[int, int, int]:
        """The tokens before a prefix, a suffix and what stands between them; negative: the model has none."""
        of_each = llama_cpp.llama_vocab_fim_pre, llama_cpp.llama_vocab_fim_suf, llama_cpp.llama_vocab_fim_mid
        with self._reading():
            prefix, suffix, middle = (int(get(self._vocab)) for get in of_each)
        return prefix, suffix, middle

    def project_tokens(self) -> tuple[int, int]:
        """The tokens before the name of a project and that of a file in it; negative: the model has none."""
        with self._reading():
            return int(llama_cpp.llama_vocab_fim_rep(self._vocab)), int(llama_cpp.llama_vocab_fim_sep(self._vocab))
