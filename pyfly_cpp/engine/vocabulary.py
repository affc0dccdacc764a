"""The tokens of a loaded model, one by one."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

_ROOM = 64  # bytes that hold nearly every token


class Vocabulary:
    """The vocabulary of a model as llama.cpp knows it. May be used by any thread."""

    def __init__(self, vocab: Any) -> None:
        """`vocab`: a llama_vocab as llama_cpp holds it (a ctypes pointer); must outlive this."""
        self._vocab = vocab
        self._pieces: dict[int, bytes] = {}

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token, which may be a part of a character; of a control token nothing, unless `special`."""
        piece = None if special else self._pieces.get(token)
        if piece is None:
            n_room, n = 0, _ROOM
            while n > n_room:  # at most twice: llama.cpp answers with the size, negative, where there is no room
                n_room = n
                buffer = ctypes.create_string_buffer(n_room)
                n = abs(llama_cpp.llama_token_to_piece(self._vocab, token, buffer, n_room, 0, special))
            piece = buffer.raw[:n]
            if not special:
                self._pieces[token] = piece
        return piece

    def ends_text(self, token: int) -> bool:
        """Whether a token is an end-of-text token."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))
