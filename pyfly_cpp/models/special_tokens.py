"""Texts with many special tokens, which llama.cpp reads in a time that grows with the square of their number.

Before it tokenizes, it looks for them in the text, the longest first. What stands on either side of one is tokenized by
itself, so that a text can be cut in front of one. Which tokens these are depends on the vocabulary: some have ends of
lines among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import llama_cpp

from pyfly_cpp.machine.releases import CUT_BY_SPECIAL_TOKENS

LEAST = 2**14
"""Least bytes of a text that may take long."""
_MANY = 512  # special tokens, which take llama.cpp some milliseconds
_RETRY = 64  # special tokens after which it is tried again to cut
_LONG = 256  # bytes of the longest special token of vocabularies whose texts are cut


class SpecialTokens:
    """The special tokens that llama.cpp looks for in texts."""

    def __init__(self, vocab: Any, metadata: Mapping[str, str], special: bool) -> None:
        """
        Args:
            vocab: A llama_vocab.
            metadata: Reads a value of the model's file by its key.
            special: Whether control tokens are also looked for.
        """
        hidden = 0 if special else llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        wanted = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN \
            | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED  # fmt: skip
        strips = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP | llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
        self._strips = False
        texts: set[bytes] = set()
        for token in range(llama_cpp.llama_vocab_n_tokens(vocab)):
            kind = llama_cpp.llama_vocab_get_attr(vocab, token)
            if kind & wanted and not kind & hidden:
                texts.add(llama_cpp.llama_vocab_get_text(vocab, token) or b"")
                self._strips = self._strips or bool(kind & strips)
        texts -= {b""}
        self._longest = max(map(len, texts), default=0)
        is_known = metadata.get("tokenizer.ggml.model") in CUT_BY_SPECIAL_TOKENS and 0 < self._longest <= _LONG
        self._pattern = re.compile(_any_of(texts), re.DOTALL) if is_known else None

    def parts(self, text: bytes) -> list[bytes]:
        """The text, cut so that the tokens of the parts are those of the text; not more than a few hundred special
        tokens in each, as far as that can be."""
        if self._pattern is None:
            return [text]
        cuts, n = [0], 0
        for found in self._pattern.finditer(text):
            n += 1
            if n > _MANY:
                if self._may_cut(text, *found.span()):
                    cuts.append(found.start())
                    n = 0
                else:
                    n -= _RETRY
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)])]

    def _may_cut(self, text: bytes, begin: int, end: int) -> bool:
        """Whether llama.cpp certainly finds the special token that stands here, and none across its beginning."""
        assert self._pattern is not None
        if self._strips and (text[begin - 1 : begin].isspace() or text[begin : begin + 1].isspace()):
            return False
        before = (self._pattern.match(text, i) for i in range(max(0, begin - self._longest + 1), begin))
        if any(found.end() > begin for found in before if found is not None):
            return False
        own = text[begin:end]
        within = (self._pattern.match(text, i) for i in range(begin + 1, end))
        others = (found for found in within if found is not None and found.end() > end and found[0] != own)
        return all(len(found[0]) < len(own) for found in others)


def _any_of(texts: Iterable[bytes]) -> bytes:
    """A pattern for the longest of these texts at a place; fast even with thousands of them."""
    tree: dict[int, Any] = {}
    for text in texts:
        branch = tree
        for byte in text:
            branch = branch.setdefault(byte, {})
        branch[-1] = None  # one ends here
    return _pattern_of(tree)


def _pattern_of(tree: dict[int, Any]) -> bytes:
    ways = [re.escape(bytes([byte])) + _pattern_of(branch) for byte, branch in tree.items() if byte >= 0]
    if not ways:
        return b""
    joined = ways[0] if len(ways) == 1 and -1 not in tree else b"(?:" + b"|".join(ways) + b")"
    return joined + b"?" if -1 in tree else joined
