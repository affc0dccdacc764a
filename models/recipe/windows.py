"""Batches of token windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from recipe.corpus import as_chat
from recipe.shapes import N_WINDOW
from recipe.vocabulary import ENDOFTEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

N_BATCH = 16
"""Windows of a training step."""

Documents = list[npt.NDArray[np.int64]]


def encode(tokenizer: Tokenizer, documents: list[str]) -> Documents:
    """Token ids of every document, and of every second one's chat form; each ends with <|endoftext|>."""
    chats = [chat for chat in map(as_chat, documents[::2]) if chat is not None]
    encodings = tokenizer.encode_batch([*documents, *chats])
    return [np.array([*encoding.ids, ENDOFTEXT], dtype=np.int64) for encoding in encodings]


def batches(documents: Documents, n_batches: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Batches [N_BATCH, N_WINDOW + 1]. Like a prompt, every window begins with a document; others follow, the last one
    cut. Every document begins once in an epoch, in an order that the seed decides."""
    stream = _documents_forever(documents, np.random.default_rng(seed))
    for _ in range(n_batches):
        yield np.stack([_window(stream) for _ in range(N_BATCH)])


def _window(stream: Iterator[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    parts, n_tokens = [], 0
    while n_tokens <= N_WINDOW:
        parts.append(next(stream))
        n_tokens += len(parts[-1])
    return np.concatenate(parts)[: N_WINDOW + 1]


def _documents_forever(documents: Documents, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
    while True:
        for i in rng.permutation(len(documents)):
            yield documents[i]
