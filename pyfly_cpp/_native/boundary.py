"""How calls cross the boundary: statuses become exceptions, arrays become pointers, handles are freed once.

Two doors guard it: `check` turns a status into an exception with the message of the core, and `floats` and `tokens`
turn what the caller has into contiguous arrays of the right type before a pointer to them is taken.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pyfly_cpp._native.library import ffi, lib
from pyfly_cpp.errors import (
    ArgumentError,
    ContextFullError,
    IncompatibleDraftError,
    NativeError,
    NotFiniteError,
    PyflyError,
)

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.int32]

_EXCEPTIONS: dict[int, type[Exception]] = {
    lib.PYFLY_STATUS_INVALID: ArgumentError,
    lib.PYFLY_STATUS_NO_MEMORY: MemoryError,
    lib.PYFLY_STATUS_NATIVE: NativeError,
    lib.PYFLY_STATUS_NOT_FINITE: NotFiniteError,
    lib.PYFLY_STATUS_CONTEXT_FULL: ContextFullError,
    lib.PYFLY_STATUS_INCOMPATIBLE: IncompatibleDraftError,
    lib.PYFLY_STATUS_INTERNAL: PyflyError,
}


class _CallbackFailures(threading.local):
    """The exceptions of Python callbacks, raised while C was calling them on this thread, by their numbers; each is
    raised again where C reports it."""

    def __init__(self) -> None:
        self.kept: dict[int, BaseException] = {}
        self.n = 0


_MOST_KEPT = 256  # C asks again after some failures, and reports the second one alone
_callback_failures = _CallbackFailures()


def keep_failure(exception: Any, value: BaseException | None, traceback: Any) -> int:
    """The `onerror` of a callback: what it raised is raised by the `check` around the call. What it returns for it has
    its number."""
    own = _callback_failures
    own.n += 1
    if value is not None:
        own.kept[own.n] = value
    if len(own.kept) > _MOST_KEPT:
        del own.kept[min(own.kept)]
    return -own.n


@ffi.def_extern(error=1, onerror=keep_failure)  # type: ignore[untyped-decorator]
def pyfly_py_stop() -> int:
    """What takes long in C asks here whether to go on: Python runs the handlers of signals that have come, and what one
    raises (KeyboardInterrupt) ends it."""
    for _ in (0,):
        pass
    return 0


lib.pyfly_set_stop(lib.pyfly_py_stop)


def failure(call: Callable[..., int], *arguments: Any) -> BaseException | None:
    """Calls a function of pyfly.h with an error buffer and returns what it reports, None for nothing."""
    error = ffi.new("pyfly_error *")
    status = call(*arguments, error)
    return None if status == lib.PYFLY_OK else _reported(status, error)


def _reported(status: int, error: Any) -> BaseException:
    message = ffi.string(error.message).decode("utf-8", errors="replace")
    if status == lib.PYFLY_STATUS_CALLBACK and (kept := _callback_failures.kept):
        number = re.search(r"\((\d+)\)$", message)  # else the newest
        found = kept.pop(int(number[1]) if number else max(kept), None)
        if found is not None:
            return found
    return _EXCEPTIONS.get(status, PyflyError)(message + ".")


def check(call: Callable[..., int], *arguments: Any) -> None:
    """Calls a function of pyfly.h and raises what it reports. Not by way of `failure`: every step passes here."""
    error = ffi.new("pyfly_error *")
    status = call(*arguments, error)
    if status != lib.PYFLY_OK:
        raise _reported(status, error)


def floats(name: str, values: Any, shape: tuple[int | None, ...]) -> FloatArray:
    """A C-contiguous float32 array of this shape (None: any length), copied only if need be."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be an array of numbers, not of {array.dtype}.")
    if array.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, array.shape)):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape [{wanted}], not {list(array.shape)}.")
    return np.ascontiguousarray(array, dtype=np.float32)


def tokens(name: str, values: Any, length: int | None = None) -> TokenArray:
    """A C-contiguous int32 array [length] of token ids."""
    try:
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError):  # no sequence, or a ragged one
        raise ValueError(f"{name} must be a one-dimensional sequence of token ids, not {values!r}.") from None
    if array.size == 0:
        array = np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"{name} must be a one-dimensional sequence of token ids.")
    if length is not None and array.shape[0] != length:
        raise ValueError(f"{name} must hold {length} tokens, not {array.shape[0]}.")
    if array.size and (array.min() < -(2**31) or array.max() > 2**31 - 1):
        raise ValueError(f"{name} holds a token id that is not a 32-bit integer.")
    return np.ascontiguousarray(array, dtype=np.int32)


def float_pointer(array: FloatArray) -> Any:
    """A pointer to the array's memory; keep the array as long as it is used."""
    return ffi.cast("float *", ffi.from_buffer(array))


def token_pointer(array: TokenArray) -> Any:
    """A pointer to the array's memory; keep the array as long as it is used."""
    return ffi.cast("int32_t *", ffi.from_buffer(array))


def void_pointer(pointer: Any) -> Any:
    """The target of a ctypes pointer of llama_cpp, for C."""
    return ffi.cast("void *", ctypes.cast(pointer, ctypes.c_void_p).value or 0)


class NativeHandle:
    """An owned pointer of pyfly.h; a context manager, freed once."""

    def __init__(self, new: Callable[..., int], free: Callable[[Any], None], kind: str, *arguments: Any) -> None:
        out = ffi.new(f"{kind} **")
        check(new, *arguments, out)
        self._free = free
        self.pointer = out[0]

    def close(self) -> None:
        """Frees the handle; a second call does nothing."""
        if self.pointer is not None:
            self._free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "pointer", None) is not None:
            self.close()
