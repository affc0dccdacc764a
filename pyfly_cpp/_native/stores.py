"""Datastores: sorting what goes into one, checking one, and the drafter that looks things up in it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pyfly_cpp._native.boundary import TokenArray, check, keep_failure, token_pointer, tokens, void_pointer
from pyfly_cpp._native.drafters import Drafter
from pyfly_cpp._native.library import ffi, lib
from pyfly_cpp._native.model import LlamaTarget


class StoreInfo(NamedTuple):
    """`pyfly_store_info` of pyfly.h."""

    n_tokens: int
    n_vocab: int
    vocabulary: int


def model_vocabulary(model: Any) -> int:
    """What tells the vocabulary of a llama_model, as llama_cpp holds it (a ctypes pointer), from others."""
    return int(lib.pyfly_model_vocabulary(void_pointer(model)))


def build_store(
    text: Any, n_vocab: int, vocabulary: int, on_progress: Callable[[float], None]
) -> tuple[bytes, TokenArray]:
    """Header and suffixes of a datastore of these tokens, -1 between documents; `on_progress` is told how much is done,
    0..1, and may raise."""
    array = tokens("text", text)
    header, suffixes = ffi.new("uint8_t[]", lib.PYFLY_STORE_HEADER), np.zeros(len(array), dtype=np.int32)
    user = ffi.new_handle(on_progress)
    check(
        lib.pyfly_store_build, token_pointer(array), len(array), n_vocab, vocabulary, lib.pyfly_py_store_progress, user,
        header, token_pointer(suffixes),
    )  # fmt: skip
    return bytes(ffi.buffer(header)), suffixes


@ffi.def_extern(error=1, onerror=keep_failure)  # type: ignore[untyped-decorator]
def pyfly_py_store_progress(user: Any, done: float) -> int:
    """The progress of `build_store`."""
    ffi.from_handle(user)(done)
    return 0


class MappedFile:
    """A file in memory, for reading only; pages come as they are touched. `data` is for C, until it is closed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            self.n_bytes = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.n_bytes else None
        self.data = ffi.NULL if self._map is None else ffi.from_buffer(self._map)

    def close(self) -> None:
        """A second call does nothing."""
        if self._map is not None:
            ffi.release(self.data)
            self._map.close()
            self._map = None

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_store(path: str | os.PathLike[str], reads_all: bool = False) -> StoreInfo:
    """What the header of a datastore says; ValueError if it is none, is damaged, or (reads_all) its content is."""
    info = ffi.new("pyfly_store_info *")
    with MappedFile(path) as file:
        check(lib.pyfly_store_read, file.data, file.n_bytes, int(reads_all), info)
    return StoreInfo(int(info.n_tokens), int(info.n_vocab), int(info.vocabulary))


class RetrievalDrafter(Drafter):
    """Looks up in the datastore at `path`, of the target's vocabulary or, without a target, of its own.

    Args:
        sizes: max_ngram, min_ngram, num_pred, max_matches of pyfly.h.
    """

    def __init__(self, target: LlamaTarget | None, path: str | os.PathLike[str], *sizes: int) -> None:
        vocabulary = read_store(path).vocabulary if target is None else target.vocabulary
        self._file = MappedFile(path)
        try:
            super().__init__("retrieval", "retrieval", self._file.data, self._file.n_bytes, vocabulary, *sizes)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        super().close()
        self._file.close()
