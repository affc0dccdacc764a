"""Exceptions. Each message is one sentence that names the thing and the remedy."""

from __future__ import annotations


class PyflyError(RuntimeError):
    """Base of what goes wrong at run time; bad arguments are plain `ValueError`."""


class NativeError(PyflyError):
    """llama.cpp refused or failed; the message has its return code where there is one."""


class RpcError(NativeError):
    """An RPC server is not there, or speaks another version of the protocol."""


class NotFiniteError(PyflyError):
    """A logits row has no distribution: NaN, +inf, or -inf everywhere."""


class ContextFullError(PyflyError, ValueError):
    """The next token does not fit in the context."""


class IncompatibleDraftError(PyflyError, ValueError):
    """The drafter cannot draft for this target; the message names the first difference."""


class VersionMismatchError(PyflyError, ImportError):
    """The installed llama-cpp-python is not the release pyfly-cpp was compiled against."""


class BusyError(PyflyError):
    """Two threads, or two generations, on one object that serves one at a time."""
