"""The adapters that a context applies: LoRA with their scales, and a control vector.

llama.cpp does not tell which they are, and they may change at any time, while a context's memory stays as it was
computed. So llama_cpp's functions that load and set them note it here, whoever calls them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import llama_cpp

from pyfly_cpp.machine.files import fingerprint


class Applied(NamedTuple):
    """The adapters of a context; equal if the context computes the same."""

    loras: tuple[tuple[str, float], ...] = ()
    """What tells a file from others, and the scale, in order."""
    control: str = ""
    """What tells a control vector from others; empty: there is none."""


_files: dict[int, str] = {}
_applied: dict[int, Applied] = {}


def applied(context: int) -> Applied:
    """The adapters that a context applies now. `context`: a llama_context as llama_cpp has it."""
    return _applied.get(_address(context), Applied())


def _address(pointer: Any) -> int:
    return pointer if isinstance(pointer, int) else ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _number(n: Any) -> int:
    return int(getattr(n, "value", n))


def _note_load(adapter: Any, path: Any) -> None:
    name = os.fsdecode(getattr(path, "value", path))
    _files.pop(_address(adapter), None)
    with contextlib.suppress(OSError):
        _files[_address(adapter)] = fingerprint(name)


def _note_load_of_stream(adapter: Any) -> None:
    _files[_address(adapter)] = uuid.uuid4().hex  # only this very one is the same


def _note_loras(context: Any, adapters: Any, n: Any, scales: Any) -> None:
    addresses = [_address(adapters[i]) for i in range(_number(n))]
    found = [(_files.get(address, str(address)), float(scales[i])) for i, address in enumerate(addresses)]
    loras = tuple(sorted(pair for pair in found if pair[1] != 0.0))  # llama.cpp leaves those out
    _applied[_address(context)] = applied(context)._replace(loras=loras)


def _note_control(context: Any, data: Any, n: Any, *where: Any) -> None:
    control = ""
    if data is not None:
        content = ctypes.string_at(data, _number(n) * ctypes.sizeof(ctypes.c_float))
        control = hashlib.sha256(content + repr([_number(one) for one in where]).encode()).hexdigest()
    _applied[_address(context)] = applied(context)._replace(control=control)


def _forget(context: Any) -> None:
    _applied.pop(_address(context), None)


def _listen(function: Any, note: Callable[[Any, tuple[Any, ...]], None]) -> None:
    """Has ctypes call `note` with the result and the arguments of each call from Python."""

    def after(result: Any, _: Any, arguments: tuple[Any, ...]) -> Any:
        note(result, arguments)
        return result

    function.errcheck = after


def _if_done(note: Callable[..., None]) -> Callable[[Any, tuple[Any, ...]], None]:
    return lambda result, arguments: note(*arguments) if result == 0 else None


_listen(llama_cpp.llama_adapter_lora_init, lambda adapter, arguments: _note_load(adapter, arguments[1]))
_listen(llama_cpp.llama_adapter_lora_init_from_file_ptr, lambda adapter, _: _note_load_of_stream(adapter))
_listen(llama_cpp.llama_set_adapters_lora, _if_done(_note_loras))
_listen(llama_cpp.llama_set_adapter_cvec, _if_done(_note_control))
# A new context may be where an earlier one was.
_listen(llama_cpp.llama_init_from_model, lambda context, _: _forget(context))
