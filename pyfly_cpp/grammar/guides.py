"""Which tokens may come next in a text that follows a schema, by llguidance."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pyfly_cpp.grammar.schemas import SchemaGrammar

CALL_MARKERS = "<tool_call>", "</tool_call>"
"""What stands around a call, in some vocabularies as control tokens."""

_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
"""A state takes up to 2 kB. A step is limited by llguidance itself, to some milliseconds in nearly all grammars."""
_BY_CHARACTER = LLParserLimits(max_lexer_states=20_000, step_max_items=300_000, verbose_errors=False)
"""50,000 are too few for `[a-z]+ "e" [a-z]*` and the 150,000 tokens of a large vocabulary."""
_MOST_BYTES = 2**16
"""Of a token's text."""


class GuideTokens(NamedTuple):
    """The tokens of a vocabulary."""

    texts: LLTokenizer
    ends: npt.NDArray[np.int32]
    """Those that end a text. llguidance is told of the first."""


def tokens_of(vocab: Any) -> GuideTokens:
    """The tokens of a llama_vocab as llama_cpp holds it, which must outlive them. Takes a second for a large one."""
    buffer = ctypes.create_string_buffer(_MOST_BYTES)
    tokens, ends = [], []
    for token in range(llama_cpp.llama_vocab_n_tokens(vocab)):
        n = llama_cpp.llama_token_to_piece(vocab, token, buffer, _MOST_BYTES, 0, True)
        piece = ctypes.string_at(buffer, max(n, 0))
        if llama_cpp.llama_vocab_is_control(vocab, token) and piece.decode("utf-8", "replace") not in CALL_MARKERS:
            piece = b"\xff" + piece  # llguidance's mark of what stands for no text
        tokens.append(piece)
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            ends.append(token)
    tokenize = ctypes.cast(llama_cpp.llama_tokenize, ctypes.c_void_p).value
    make: Callable[..., LLTokenizer] = LLTokenizer.from_llamacpp  # type: ignore[attr-defined]  # of llguidance.llamacpp
    end = ends[0] if ends else 0
    texts = make(tokens=tokens, vocab_ptr=vocab, tokenize_fptr=tokenize, eos_token=end, slices=None)
    return GuideTokens(texts, np.array(ends, dtype=np.int32))


class Guide:
    """A text and its grammar. Used by one thread at a time."""

    def __init__(self, tokens: GuideTokens, grammar: SchemaGrammar) -> None:
        """Raises ValueError: the grammar is too large."""
        self._ends = tokens.ends
        self._matcher = LLMatcher(
            tokens.texts, grammar.text, limits=_BY_CHARACTER if grammar.is_by_character else _LIMITS, log_level=0
        )
        self._known = np.zeros(0, dtype=np.int32)
        self._require_good()

    def fill(self, tokens: npt.NDArray[np.int32], bits: npt.NDArray[np.uint32]) -> None:
        """Sets the bits, [(n_vocab + 31) // 32], of the tokens that may follow some others, [n], which may differ from
        those of the last call: drafts are taken back. Raises ValueError: the grammar becomes too large there."""
        if len(tokens) and tokens[-1] in self._ends:
            bits[:] = 0
            self._allow_ends(bits)
            return
        n = min(len(tokens), len(self._known))
        is_other = tokens[:n] != self._known[:n]
        n_same = int(is_other.argmax()) if is_other.any() else n
        if n_same < len(self._known):
            self._matcher.rollback(len(self._known) - n_same)
        if n_same < len(tokens):
            self._matcher.consume_tokens(tokens[n_same:].tolist())
        self._known = tokens.copy()
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._require_good()
        if self._matcher.is_accepting():
            self._allow_ends(bits)

    def _allow_ends(self, bits: npt.NDArray[np.uint32]) -> None:
        np.bitwise_or.at(bits, self._ends // 32, np.uint32(1) << (self._ends % 32).astype(np.uint32))

    def _require_good(self) -> None:
        if self._matcher.is_error():
            reason = (self._matcher.get_error().splitlines() or ["nothing can follow"])[0]
            raise ValueError(f"the grammar cannot be followed ({reason[:200].rstrip('.')}); make it simpler.")
