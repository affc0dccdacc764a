"""Settings to compare, as they are written on the command line: `plain`, `exact`, `"entropy:0.3 agree:4 k=8 lookup"`.

A setting is a gate and, in any order, words for what else it fixes:
`agree[:W]` or `reconverge[:W]` (the window's rule and size), `tail=N`, `across` or `in-round`, `k=N` (tokens drafted in
a round), `adaptive` (the governor chooses drafter and length of every round, K at most, as in `chat`), and the drafter:
`lookup`, one with `[:FILE]` (`draft`, `multi`, `cross`, `mtp`, `eagle3`, `dflash`, `dspark`)
or `both` (quotes around a FILE with spaces).
What is not said of the window is as in the gate's own, and else the default. `plain` drafts nothing. (The words are
those of the tables in rules/, windows.py and drafters/.)
"""

from __future__ import annotations

import difflib
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pyfly_cpp import windows
from pyfly_cpp.drafters import DRAFTERS
from pyfly_cpp.drafters import WORDS as DRAFTER_WORDS
from pyfly_cpp.rules import Exact, Gate, examples, parse_gate
from pyfly_cpp.windows import Window


@dataclass(frozen=True)
class Setting:
    """One way to decode."""

    gate: Gate = Exact()  # noqa: RUF009 - frozen
    window: Window | None = None
    """None: the gate's own, as which it is kept, too, where it is the same or the gate is lossless."""
    draft_max: int | None = None
    """K; None: what the drafter says."""
    drafter: str | None = None
    """A word of `drafters.WORDS`, with `:FILE` behind it where the word takes one, or `"none"`; None: the default."""
    adaptive: bool = False
    """Whether the governor chooses; what is drafted then depends on measured times and cannot be repeated."""

    def __post_init__(self) -> None:
        if self.gate.is_lossless or {self.window} == set(self.gate.windows()):
            object.__setattr__(self, "window", None)

    @property
    def is_plain(self) -> bool:
        """Whether it drafts nothing."""
        return self.drafter == "none" or self.draft_max == 0

    @property
    def is_exact(self) -> bool:
        """Whether it is lossless (plain decoding included)."""
        return self.is_plain or self.gate.is_lossless

    def __str__(self) -> str:
        """The shortest form that reads back as this setting; its name in tables and files."""
        if self.is_plain:
            return "plain"
        words = [str(self.gate)]
        if self.window is not None:
            words.append(str(self.window))
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
    try:
        return _read_words(gate, words[1:])
    except ValueError as error:
        raise ValueError(f"cannot read the setting {text!r}: {error}") from None


def _read_words(gate: Gate, words: Iterable[str]) -> Setting:
    window: Window | None = None
    draft_max: int | None = None
    drafter: str | None = None
    adaptive = False
    for word in words:
        name, _, value = word.replace("=", ":", 1).partition(":")
        if word.partition(":")[0] in DRAFTER_WORDS:
            drafter = parse_drafter(word)
        elif (changed := (window or gate.window).with_word(word)) is not None:
            window = changed
        elif name == "k" and name != word:
            draft_max = windows.whole(word, value)
        elif word == "adaptive":
            adaptive = True
        else:
            raise ValueError(f"unknown word {word!r}.{_hint(name)}")
    if draft_max == 0:
        raise ValueError("k=0 drafts nothing; write plain.")
    return Setting(gate, window, draft_max, drafter, adaptive)


def parse_settings(texts: list[str] | tuple[str, ...], first: tuple[Setting, ...] = (PLAIN, EXACT)) -> list[Setting]:
    """`first` and then the settings that are written, each once (`exact reconverge` is `exact`)."""
    settings: dict[str, Setting] = {}
    for setting in (*first, *(parse_setting(text) for text in texts)):
        settings.setdefault(str(setting), setting)
    return list(settings.values())


def short_names(settings: Iterable[str]) -> dict[str, str]:
    """What tables call settings (of names that read back): their files without folders, where that tells them apart."""
    short = {name: " ".join(map(_without_folders, _words(name))) for name in settings}
    times = Counter(short.values())
    return {name: text if times[text] == 1 else name for name, text in short.items()}


def require_repeatable(settings: Iterable[Setting]) -> None:
    """Raises ValueError if what a setting drafts, and so what it may accept loosely, depends on measured times."""
    for setting in settings:
        if setting.adaptive:
            raise ValueError(
                f"the setting {str(setting)!r} drafts by measured times, so its answers cannot be repeated; leave out "
                "'adaptive' here, and measure its speed with bench."
            )


def parse_drafter(word: str) -> str:
    """A drafter's word, `NAME` or `NAME:FILE`, checked; raises ValueError."""
    name, separator, file = word.partition(":")
    if name not in DRAFTER_WORDS:
        near = difflib.get_close_matches(name, DRAFTER_WORDS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown drafter {name!r}.{hint} The drafters are {', '.join(DRAFTER_WORDS)}.")
    takes_file = name in DRAFTERS and DRAFTERS[name].takes_file
    if separator and (not file or not takes_file):
        what = f"{name}:FILE, or {name} alone" if takes_file else f"{name}, which takes no file"
        raise ValueError(f"the drafter {word!r} is incomplete or too long; write {what}.")
    return f"{name}:{file}" if separator else name


def written_drafters(and_file: str = "[:FILE]") -> str:
    """The words for drafters, for people."""
    kinds = {word: DRAFTERS[word].takes_file if word in DRAFTERS else False for word in DRAFTER_WORDS}
    *words, last = (word + and_file if takes_file else word for word, takes_file in kinds.items())
    return f"{', '.join(words)} or {last}"


def written(adaptive: str = "") -> str:
    """How settings are written, for the help of commands; `adaptive` stands behind `k=N`."""
    rules = " or ".join(f"{rule}:W" for rule in windows.RULES)
    return (
        f"A setting is a gate ({examples(combined=False)}) and words: {rules}, tail=N, across or in-round "
        f"(where nothing is said: the gate's own window), k=N, {adaptive}and the drafter: {written_drafters()}."
    )


def _without_folders(word: str) -> str:
    drafter, _, file = word.partition(":")
    return f"{drafter}:{Path(file).name}" if drafter in DRAFTER_WORDS and file else word


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


def _hint(name: str) -> str:
    words = [*windows.WORDS, "adaptive", *DRAFTER_WORDS, "k="]
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    known = f" The words are {', '.join(words)}."
    return (f" Did you mean {near[0]!r}?" if near else "") + known
