"""Exceptions. Each message is one sentence that names the thing and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PyflyError(RuntimeError):
    """Base of errors at run time; bad arguments are plain `ValueError`."""


class NativeError(PyflyError):
    """llama.cpp refused or failed; the message has its return code if there is one."""


class RpcError(NativeError):
    """An RPC server is not there, or speaks another version of the protocol."""


class NotFiniteError(PyflyError):
    """A logits row has no distribution: NaN, +inf, or -inf everywhere."""


class ContextFullError(PyflyError, ValueError):
    """A prompt, or the next token, does not fit in the context."""

    n_prompt: int | None = None
    """Tokens of a prompt that leaves no room for an answer."""


class IncompatibleDraftError(PyflyError, ValueError):
    """The drafter cannot draft for this target; the message names the first difference."""


class VersionMismatchError(PyflyError, ImportError):
    """The installed llama-cpp-python is not the release pyfly-cpp was compiled against."""


class BusyError(PyflyError):
    """Two threads, or two generations, on one object that serves one at a time."""


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun, as sentences have it: `1 answer`, `3 answers`; `many` if an s is not enough."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'this'?`, the end of a message about a name that is not known; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
