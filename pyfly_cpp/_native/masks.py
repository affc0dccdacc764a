"""Masks: which tokens may come next, by a grammar outside of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfly_cpp._native.boundary import TokenArray, check, void_pointer
from pyfly_cpp._native.library import ffi, lib

Fill = Callable[[TokenArray, npt.NDArray[np.uint32]], None]
"""Given tokens, int32 [n], sets the bits of those that may follow them, uint32 [(n_vocab + 31) // 32]: bit t % 32 of
word t // 32 for token t."""


class ChainMask:
    """A sampler in a chain that forbids tokens; to be kept as long as the chain or a copy of it is used.

    What `fill` raises cannot pass through C. All tokens are forbidden then, for whoever steps the request to end it.
    """

    def __init__(self, chain: Any, n_vocab: int, fill: Fill) -> None:
        """Adds it to a llama_sampler chain as llama_cpp holds it (a ctypes pointer), before what truncates or
        selects. `fill` is called once for each row, by the thread that steps."""
        self._fill = fill
        self._failure: BaseException | None = None
        self._handle = ffi.new_handle(self)
        check(lib.pyfly_chain_mask, void_pointer(chain), n_vocab, lib.pyfly_py_mask, self._handle)

    def fill(self, tokens: TokenArray, bits: npt.NDArray[np.uint32]) -> bool:
        """Sets the bits after these tokens; False if that fails, or has failed before."""
        try:
            if self._failure is None:
                self._fill(tokens, bits)
        except BaseException as failure:
            self._failure = failure
        return self._failure is None

    def take_failure(self) -> BaseException | None:
        """What `fill` has raised, once."""
        failure, self._failure = self._failure, None
        return failure


@ffi.def_extern(error=1)  # type: ignore[untyped-decorator]
def pyfly_py_mask(user: Any, tokens: Any, n: int, bits: Any, n_words: int) -> int:
    """The bits of a ChainMask."""
    mask: ChainMask = ffi.from_handle(user)
    written = np.frombuffer(ffi.buffer(tokens, n * 4), dtype=np.int32) if n else np.zeros(0, dtype=np.int32)
    words = np.frombuffer(ffi.buffer(bits, n_words * 4), dtype=np.uint32)
    return 0 if mask.fill(written, words) else 1
