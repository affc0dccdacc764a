"""`Decoding`: how to decode, as one value.

On the command line it is called a setting, and written `plain`, `exact`, `"entropy:0.3 agree:4 k=8 lookup"`: a gate
and, in any order, words for what else it fixes:
`agree[:W]` or `reconverge[:W]` (the window's rule and size), `tail=N`, `across` or `in-round`, `k=N` (tokens drafted in
a step), `adaptive` (the governor chooses drafter and length of every step, K at most, as in `chat`) or `no-adaptive`,
and the drafter: `lookup`, one with `[:FILE]` (`draft`, `cross`, `mtp`, `eagle3`, `dflash`, `dspark`) or `both` (quotes
around a FILE with spaces).
The rest of the window is as in the gate's own, or else the default. `plain` drafts nothing. (The words are
those of the tables in gates/, windows.py and drafters/.)
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyfly_cpp.decoding import windows
from pyfly_cpp.decoding.data import drafter_as_data, drafter_of_data, require_fields
from pyfly_cpp.decoding.drafters import DRAFTERS, Drafter, OwnDrafter, require_word
from pyfly_cpp.decoding.drafters import WORDS as DRAFTER_WORDS
from pyfly_cpp.decoding.drafters.drafter import field_names
from pyfly_cpp.decoding.gates import Exact, Gate, examples, parse_gate, require_gate, require_window_for
from pyfly_cpp.decoding.windows import Window, require_window
from pyfly_cpp.errors import did_you_mean


@dataclass(frozen=True)
class Decoding:
    """How to decode: one value, whoever asks for it (a FlyLlama, a request, a preset, a command, a benchmark).

    There are three ways to write one. `parse(str(d)) == d.canonical()`, if the drafter is None or a word;
    `from_dict(d.to_dict()) == d`.
    `d.but(...)` is `d` with what a stronger side says: a request over the model's default, which is that of the options
    over the preset (`resolve.resolve_setting`).

    Raises:
        ValueError: a field is out of range, or of another type, or the gate has no use for a window.
    """

    gate: Gate = Exact()  # noqa: RUF009 - frozen
    """The rule for a draft that is not the target's choice."""
    window: Window | None = None
    """The condition under which a deferred mismatch stands; None: the gate's own."""
    draft_max: int | None = None
    """Tokens in a step (K), >= 0; 0 decodes plainly. None: the drafter's own."""
    drafter: Any = None
    """A word of `drafters.WORDS`, with `:FILE` after it if the word takes one; `"none"`; `"auto"` (chosen
    for the model); a drafter, or several. None: the default of whoever decodes."""
    adaptive: bool | None = None
    """Whether the governor chooses drafter and length; drafts then depend on measured times. None: the default of
    whoever decodes: a FlyLlama governs unless a length is set, measuring commands do not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", require_gate(self.gate))
        object.__setattr__(self, "window", require_window_for(self.gate, require_window(self.window)))
        k = self.draft_max
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
            raise ValueError(f"draft_max must be an integer >= 0 or None, not {k!r}.")
        if self.adaptive is not None and not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive must be True, False or None, not {self.adaptive!r}.")

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.drafter == "none" or self.draft_max == 0

    @property
    def is_exact(self) -> bool:
        """Whether it is lossless (plain decoding included)."""
        return self.is_plain or self.gate.is_lossless

    @property
    def effective_window(self) -> Window:
        """`window` with its default filled in."""
        return self.window or self.gate.window

    def is_governed_with(self, drafters: Sequence[Drafter]) -> bool:
        """Whether the governor chooses among these drafters in a FlyLlama: as set, or else unless a draft length was
        set, of all drafters or of one of them."""
        if self.adaptive is not None or self.draft_max is not None:
            return bool(self.adaptive)
        return bool(drafters) and all(getattr(drafter, "draft_max", None) is None for drafter in drafters)

    def require_distributions(self, drafters: Sequence[Drafter]) -> None:
        """Raises ValueError if the gate looks at distributions, and none of these drafters has any. Callables may."""
        can = [not isinstance(drafter, OwnDrafter) or drafter.has_distributions for drafter in drafters]
        if can and not any(can) and not self.is_plain and self.gate.compares_drafts:
            raise ValueError(
                f"the gate {self.gate} compares the draft's distribution with the target's, and "
                f"{' and '.join(map(str, drafters))} has none; use a draft model or a head, or another gate."
            )

    def but(self, **given: Any) -> Decoding:
        """This, with what is given; None: the field stays as it is, except for the window if the new gate has no
        use for one. Raises ValueError."""
        said = {name: value for name, value in given.items() if value is not None}
        if "gate" in said and require_gate(said["gate"]).draws:
            said.setdefault("window", None)
        return replace(self, **said)

    def canonical(self) -> Decoding:
        """The same without what changes nothing: `PLAIN` if nothing is drafted; no window if the gate is lossless or it
        is the gate's own."""
        if self.is_plain:
            return PLAIN
        if self.gate.is_lossless or self.window == self.gate.window:
            return replace(self, window=None)
        return self

    # ---- Words -------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The shortest form that reads back as this one; its name in tables and files. A drafter that is no word is
        left out."""
        short = self.canonical()
        if short.is_plain:
            return "plain"
        words = [str(short.gate)]
        if short.window is not None:
            words.append(str(short.window))
        if short.draft_max is not None:
            words.append(f"k={short.draft_max}")
        words += [word for word, value in _ADAPTIVE.items() if value is short.adaptive]
        if isinstance(short.drafter, str) and short.drafter != "auto":
            words.append(_quoted(short.drafter))
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Decoding:
        """Reads the text of `str`, in its canonical form; raises ValueError, with the nearest word, for an unknown
        one."""
        words = _words(text)
        if not words:
            raise ValueError("a setting is empty; write plain, exact, or a gate such as margin:0.3.")
        if words[0] == "plain":
            if len(words) > 1:
                raise ValueError(f"cannot read the setting {text!r}: plain drafts nothing and takes no {words[1]!r}.")
            return PLAIN
        if words[0].partition(":")[0] in DRAFTER_WORDS:
            raise ValueError(f"a setting starts with a gate, not with a drafter; write 'exact {words[0]}'.")
        gate = parse_gate(words[0])
        try:
            return _read_words(gate, words[1:]).canonical()
        except ValueError as error:
            raise ValueError(f"cannot read the setting {text!r}: {error}") from None

    # ---- Objects -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON, as in presets: gate, window and draft_max, and of the other fields those that are set; a
        null drafter is none at all. Raises ValueError for a drafter that is a callable."""
        said = {name: value for name, value in vars(self).items() if value != vars(EXACT)[name]}
        if self.drafter is not None:
            said["drafter"] = drafter_as_data(self.drafter)
        window = self.window and {k: v for k, v in asdict(self.window).items() if v is not None}
        return {**said, "gate": str(self.gate), "window": window, "draft_max": self.draft_max}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path | None = None) -> Decoding:
        """Reads the result of `to_dict`; each field may be missing.

        Args:
            folder: What relative paths of drafters are relative to; None: they stay as they are.

        Raises:
            ValueError: a field is unknown, or cannot be read; the message names it.
        """
        said = {**require_fields("how to decode", data, field_names(cls))}
        if not isinstance(said.get("gate", ""), str):
            raise ValueError(f"'gate' must be a text such as margin:0.3, not {said['gate']!r}.")
        if said.get("window") is not None:
            said["window"] = Window(**require_fields("'window'", said["window"], field_names(Window)))
        if "drafter" in said:
            said["drafter"] = drafter_of_data(said["drafter"], folder)
        return cls(**said)


OF_REQUEST = tuple(name for name in field_names(Decoding) if name not in ("drafter", "adaptive"))
"""The fields that each request of a batch may have for itself; the others are the batch's."""

_ADAPTIVE = {"adaptive": True, "no-adaptive": False}

PLAIN = Decoding(drafter="none")
EXACT = Decoding()
AS_IN_CHAT = Decoding(adaptive=True)
"""How `chat` decodes by default, at any temperature: exactly, under the governor."""


def _read_words(gate: Gate, words: Iterable[str]) -> Decoding:
    said: dict[str, Any] = {"gate": gate}
    for word in words:
        name, _, value = word.replace("=", ":", 1).partition(":")
        if word.partition(":")[0] in DRAFTER_WORDS:
            said["drafter"] = require_word(word)
        elif (changed := said.get("window", gate.window).with_word(word)) is not None:
            said["window"] = changed
        elif name == "k" and name != word:
            said["draft_max"] = windows.whole(word, value)
        elif word in _ADAPTIVE:
            said["adaptive"] = _ADAPTIVE[word]
        else:
            raise ValueError(f"unknown word {word!r}.{_hint(name)}")
    if said.get("draft_max") == 0:
        raise ValueError("k=0 drafts nothing; write plain.")
    return Decoding(**said)


def parse_settings(texts: list[str] | tuple[str, ...], first: tuple[Decoding, ...] = (PLAIN, EXACT)) -> list[Decoding]:
    """`first` and then the settings that are written, each once (`exact reconverge` is `exact`)."""
    settings: dict[str, Decoding] = {}
    for setting in (*first, *(Decoding.parse(text) for text in texts)):
        settings.setdefault(str(setting), setting)
    return list(settings.values())


def short_names(settings: Iterable[str]) -> dict[str, str]:
    """Names of settings in tables (from names that read back): their files without folders, if that tells them
    apart."""
    short = {name: " ".join(map(_without_folders, _words(name))) for name in settings}
    times = Counter(short.values())
    return {name: text if times[text] == 1 else name for name, text in short.items()}


def require_repeatable(settings: Iterable[Decoding]) -> None:
    """Raises ValueError if the drafts of a setting, and so its loose accepts, depend on measured times."""
    for setting in settings:
        if setting.adaptive:
            raise ValueError(
                f"the setting {str(setting)!r} drafts by measured times, so its answers cannot be repeated; leave out "
                "'adaptive' here, and measure its speed with bench."
            )


def written_drafters(and_file: str = "[:FILE]") -> str:
    """The words for drafters, for people."""
    words = (word + and_file if kind.takes_file else word for word, kind in DRAFTERS.items())
    return f"{', '.join(words)}, both (lookup and the draft model) or lookup+WORD"


def written(adaptive: str = "") -> str:
    """The form of settings, for the help of commands; `adaptive` stands behind `k=N`."""
    rules = " or ".join(f"{rule}:W" for rule in windows.RULES)
    return (
        f"A setting begins with a gate: {examples(combined=False)}. Words for the window may follow: {rules}, tail=N, "
        f"across or in-round. Without them, the window is the gate's own. Further words are k=N (tokens to draft)"
        f"{', ' + adaptive if adaptive else ''} and a drafter: {written_drafters()}."
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
    words = [*windows.WORDS, *_ADAPTIVE, *DRAFTER_WORDS, "k="]
    return f"{did_you_mean(name, words, 0.5)} The words are {', '.join(words)}."
