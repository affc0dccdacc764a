"""Exceptions. Each message is one sentence that names the thing and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

_IN_PYTHON = {
    "draft_max": "draft_max",
    "n_ctx": "n_ctx",
    "n_batch": "n_batch",
    "n_parallel": "n_parallel",
    "room": "n_parallel, n_ctx or n_cells",
    "flash_attn": "flash_attn=True",
    "type_v": "type_v",
    "verbose": "verbose=True",
    "head": "as MTP(model_path=...)",
    "cross": "CrossVocabulary(DraftModel(...))",
    "draft_model": "DraftModel(...)",
    "dflash": "DFlash(...)",
    "dspark": "DSpark(...)",
    "draft": "",
    "guess": "",
    "log": "",
}
"""What messages name by a word in braces, in Python's words. `draft`: a place to tell how else a drafter's file is
given. `log`: a place for llama.cpp's own reason, if its log is kept; `guess`: what follows is a guess, which
our sentence for such a reason replaces."""


_PLACE = re.compile(r"""(?<!\w)(?:'[^']*'|"[^"]*")|\{(\w+)\}""")
"""Something in quotes, such as a file's name, or a word in braces outside of them."""


class NamingError(Exception):
    """An error whose message names arguments, each of `_IN_PYTHON` as `{draft_max}`, outside of quotes. Its text has
    Python's words; `in_words` has others'."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_worded(message, _IN_PYTHON))
        self.message = message

    def in_words(self, words: Mapping[str, str]) -> str:
        """The text with these words, and with Python's for other arguments."""
        return _worded(self.message, {**_IN_PYTHON, **words})

    def around(self, word: str) -> tuple[str, str] | None:
        """The message before this word and after it; None if it does not have it."""
        text = self.message
        return next(((text[: at.start()], text[at.end() :]) for at in _PLACE.finditer(text) if at[1] == word), None)


def _worded(message: str, words: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda found: words.get(found[1], found[0]), message)


class ArgumentError(NamingError, ValueError):
    """An argument is wrong."""


class PyflyError(NamingError, RuntimeError):
    """Base of errors at run time; bad arguments are a `ValueError`."""


class NativeError(PyflyError):
    """llama.cpp refused or failed; the message has its return code if there is one."""


class RpcError(NativeError):
    """An RPC server cannot be reached, or speaks another version of the protocol."""


class NotFiniteError(PyflyError):
    """A logits row has no distribution: NaN, +inf, or -inf everywhere."""


class ContextFullError(PyflyError, ValueError):
    """A prompt, or the next token, does not fit in the context."""

    n_prompt: int | None = None
    """Tokens of a prompt that leaves no room for an answer."""


class IncompatibleDraftError(PyflyError, ValueError):
    """The drafter cannot draft for this target; the message names the first difference."""


class VersionMismatchError(PyflyError, ImportError):
    """The llama-cpp-python that pyfly-cpp was compiled against is missing, does not load, or is another one."""


class BusyError(PyflyError):
    """Two threads, or two generations, on one object that serves one at a time."""


def counted(n: int, one: str, many: str = "") -> str:
    """A number with its noun, as sentences have it: `1 answer`, `3 answers`; `many` if an s is not enough."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'this'?`, the end of a message about a name that is not known; empty if none is near. The nearest
    are names of the same letters."""
    names = list(known)
    turned = [one for one in names if sorted(one) == sorted(name)]
    near = turned or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
