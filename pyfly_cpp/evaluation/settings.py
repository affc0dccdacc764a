"""Settings to compare, as they are written on the command line: `plain`, `exact`, `"margin:0.3 reconverge k=8 lookup"`.

A setting is a gate and, in any order, words for what else it fixes:
`agree[:W]` or `reconverge[:W]` (the window's rule and size), `tail=N`, `across` or `in-round`, `k=N` (tokens drafted in
a round), `adaptive` (the governor chooses drafter and length of every round, K at most, as in `chat`), and the drafter:
`lookup`, `draft[:FILE]`, `mtp[:FILE]`, `eagle3[:FILE]` or `both` (quotes around a FILE with spaces). What is not said
is the default. `plain` drafts nothing.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from pyfly_cpp.gates import Exact, Gate, parse_gate
from pyfly_cpp.window import RULES, Window

DRAFTERS = ("lookup", "draft", "mtp", "eagle3", "both")
"""The drafters by their words: prompt lookup, a draft model, an MTP head (without a file: the target's own), an EAGLE-3
head, prompt lookup and the draft model behind it."""

_WITH_FILE = ("draft", "mtp", "eagle3")


@dataclass(frozen=True)
class Setting:
    """One way to decode."""

    gate: Gate = Exact()  # noqa: RUF009 - frozen
    window: Window = Window()  # noqa: RUF009 - frozen
    draft_max: int | None = None
    """K; None: what the drafter says."""
    drafter: str | None = None
    """One of `DRAFTERS`, with `:FILE` behind it where the word takes one, or `"none"`; None: the default."""
    adaptive: bool = False
    """Whether the governor chooses; what is drafted then depends on measured times and cannot be repeated."""

    @property
    def is_plain(self) -> bool:
        """Whether it drafts nothing."""
        return self.drafter == "none" or self.draft_max == 0

    @property
    def is_exact(self) -> bool:
        """Whether it is lossless (plain decoding included)."""
        return self.is_plain or isinstance(self.gate, Exact)

    def __str__(self) -> str:
        """The shortest form that reads back as this setting; its name in tables and files."""
        if self.is_plain:
            return "plain"
        words = [str(self.gate)]
        if not self.is_exact:
            default = Window()
            if (self.window.rule, self.window.size) != (default.rule, default.size):
                size = "" if self.window.size == default.size else f":{self.window.size}"
                words.append(f"{self.window.rule}{size}")
            if self.window.tail is not None:
                words.append(f"tail={self.window.tail}")
            if self.window.across_rounds is not None:
                words.append("across" if self.window.across_rounds else "in-round")
        if self.draft_max is not None:
            words.append(f"k={self.draft_max}")
        if self.adaptive:
            words.append("adaptive")
        if self.drafter is not None:
            words.append(_quoted(self.drafter))
        return " ".join(words)


PLAIN = Setting(drafter="none")
EXACT = Setting()


def parse_setting(text: str) -> Setting:
    """Reads a setting; raises ValueError, with the nearest word, for what it does not know."""
    words = _words(text)
    if not words:
        raise ValueError("a setting is empty; write plain, exact, or a gate such as margin:0.3.")
    if words[0] == "plain":
        if len(words) > 1:
            raise ValueError(f"cannot read the setting {text!r}: plain drafts nothing and takes no {words[1]!r}.")
        return PLAIN
    gate = parse_gate(words[0])
    rule, size, tail, across = "agree", 6, None, None
    draft_max: int | None = None
    drafter: str | None = None
    adaptive = False
    for word in words[1:]:
        name, separator, value = word.replace("=", ":", 1).partition(":")
        if word.partition(":")[0] in DRAFTERS:
            drafter = parse_drafter(word, f"cannot read the setting {text!r}: ")
        elif name in RULES:
            rule = name
            size = _whole(text, word, value) if separator else size
        elif name in ("k", "tail", "window") and separator:
            number = _whole(text, word, value)
            if name == "k":
                draft_max = number
            elif name == "tail":
                tail = number
            else:
                size = number
        elif word in ("across", "in-round"):
            across = word == "across"
        elif word == "adaptive":
            adaptive = True
        else:
            raise ValueError(f"cannot read the setting {text!r}: unknown word {word!r}.{_hint(name)}")
    if draft_max == 0:
        raise ValueError(f"cannot read the setting {text!r}: k=0 drafts nothing; write plain.")
    return Setting(gate, Window(size, rule, tail, across), draft_max, drafter, adaptive)


def parse_settings(texts: list[str] | tuple[str, ...], first: tuple[Setting, ...] = (PLAIN, EXACT)) -> list[Setting]:
    """`first` and then the settings that are written, each once (`exact reconverge` is `exact`)."""
    settings: dict[str, Setting] = {}
    for setting in (*first, *(parse_setting(text) for text in texts)):
        settings.setdefault(str(setting), setting)
    return list(settings.values())


def require_repeatable(settings: Iterable[Setting]) -> None:
    """Raises ValueError if what a setting drafts, and so what it may accept loosely, depends on measured times."""
    for setting in settings:
        if setting.adaptive:
            raise ValueError(
                f"the setting {str(setting)!r} drafts by measured times, so its answers cannot be repeated; leave out "
                "'adaptive' here, and measure its speed with bench."
            )


def parse_drafter(word: str, where: str = "") -> str:
    """A drafter's word, `NAME` or `NAME:FILE`, checked; `where` begins the message of the ValueError."""
    name, separator, file = word.partition(":")
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}unknown drafter {name!r}.{hint} The drafters are {', '.join(DRAFTERS)}.")
    if separator and (not file or name not in _WITH_FILE):
        what = f"{name}:FILE, or {name} alone" if name in _WITH_FILE else f"{name}, which takes no file"
        raise ValueError(f"{where}the drafter {word!r} is incomplete or too long; write {what}.")
    return f"{name}:{file}" if separator else name


def _quoted(word: str) -> str:
    if not any(c.isspace() or c in "\"'" for c in word):
        return word
    return f"'{word}'" if '"' in word else f'"{word}"'


def _words(text: str) -> list[str]:
    """Words, with quotes around what has spaces in it; backslashes are themselves (paths of Windows)."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        raise ValueError(f"cannot read the setting {text!r}: a quote is not closed.") from None


def _whole(text: str, word: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) > 2**31 - 1:
        raise ValueError(f"cannot read the setting {text!r}: {word!r} needs a whole number >= 0.")
    return int(value)


def _hint(name: str) -> str:
    words = [*RULES, "across", "in-round", "adaptive", *DRAFTERS, "k=", "tail=", "window="]
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    known = f" The words are {', '.join(words)}."
    return (f" Did you mean {near[0]!r}?" if near else "") + known
