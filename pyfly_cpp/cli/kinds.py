"""Kinds of values that options of the command line take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from pyfly_cpp.decoding.drafters import DRAFTERS, require_word
from pyfly_cpp.decoding.gates import parse_gate
from pyfly_cpp.decoding.gates.forms import FORMS
from pyfly_cpp.decoding.presets import SHIPPED
from pyfly_cpp.decoding.resolve import AUTO as AUTO_DRAFTER
from pyfly_cpp.decoding.windows import Window
from pyfly_cpp.errors import did_you_mean
from pyfly_cpp.llama.prompting import chat_formats
from pyfly_cpp.machine.releases import MOST_THREADS
from pyfly_cpp.machine.rpc import split_address
from pyfly_cpp.machine.threads import AUTO
from pyfly_cpp.models.named import EMBEDDED, named_models


class Written(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """What a function reads out of a text; its ValueError names the fault. A shell completes words, or files."""

    def __init__(
        self,
        name: str,
        read: Callable[[str], Any] = str,
        words: Callable[[str], Iterable[str]] = lambda _: (),
        is_file: bool = False,
    ) -> None:
        """
        Args:
            words: Words that it can be, given its typed beginning.
            is_file: It can name a file.
        """
        self.name = name
        self._read = read
        self._words = words
        self._is_file = is_file

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The file comes first: for bash, it would clear the words before it. With words, bash offers no files."""
        files = [CompletionItem(incomplete, type="file")] if self._is_file else []
        words = (word for word in self._words(incomplete) if word.startswith(incomplete))
        return [*files, *map(CompletionItem, words)]


def _named(typed: str) -> Iterable[str]:
    """Names of models, once one has begun: otherwise bash would offer no files."""
    return [EMBEDDED, *named_models()] if typed else ()


def _drafter(text: str) -> str:
    return text if text in (AUTO_DRAFTER, "none") else require_word(text)


def _window(text: str) -> str:
    Window().but_written(text)
    return text


def _chat_format(text: str) -> str:
    known = chat_formats()
    if text not in known and not text.startswith("chat_template."):  # those of the model itself
        raise ValueError(
            f"there is no chat format {text!r}.{did_you_mean(text, known)} The formats are {', '.join(known)}."
        )
    return text


def _names(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"{text!r} has an empty name; write CUDA0,192.168.0.7:50052, or none for the CPU.")
    return names


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ValueError(f"{text!r} has an empty name; write one or several like small,code.")
    return words


def _servers(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        split_address(name)
    return names


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share < math.inf for share in shares) or not sum(shares):
        raise ValueError(f"{text!r} is not a list of shares; write one number for each GPU, such as 3,1.")
    return shares


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError
    return int(text)


def _count_or_auto(things: str, most: int | None = None) -> Callable[[str], int | str]:
    def read(text: str) -> int | str:
        with contextlib.suppress(ValueError):
            if text == AUTO:
                return text
            n = _positive(text)
            if most is None or n <= most:
                return n
        limit = ">= 1" if most is None else f"in 1..{most}"
        raise ValueError(f"{text!r} is not a number of {things} {limit}, or 'auto'.")

    return read


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({_positive(part.strip()) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"{text!r} is not a number of requests >= 1, or several like 1,4,8.") from None


FILE = Written("file", is_file=True)
FOLDER = Written("folder", is_file=True)
MODEL = Written("model", words=_named, is_file=True)
PRESET = Written("preset", words=lambda _: SHIPPED, is_file=True)
GATE = Written("gate", parse_gate, lambda _: [form.word for form in FORMS if form.numbers is not None])
WINDOW = Written("window", _window)
DRAFTER = Written("drafter", _drafter, lambda _: [AUTO_DRAFTER, "none", *DRAFTERS])
CHAT_FORMAT = Written("chat format", _chat_format)
NAMES = Written("devices", _names)
"""Names with commas between them; "none": no name."""
WORDS = Written("names", _words)
"""Names with commas between them, at least one."""
SERVERS = Written("servers", _servers)
SHARES = Written("shares", _shares)
"""Numbers with commas between them, none below 0."""
THREAD_COUNT = Written("threads", _count_or_auto("threads", MOST_THREADS))
PARALLEL_COUNT = Written("parallel", _count_or_auto("requests"))
PARALLEL_COUNTS = Written("parallel", _counts)
"""Numbers of requests at a time, with commas between them; each once, in ascending order."""


def _described(kind: click.IntRange | click.FloatRange, described: str) -> str:
    """A range for the help: nothing if there is no bound, of which click makes `x<=None`."""
    return "" if kind.min is None and kind.max is None else described


class Int(click.IntRange):
    """An integer that fits into C's int."""

    name = "integer"

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not -(2**31) <= number < 2**31:
            self.fail(f"{number} is too large; the largest is {2**31 - 1}.", param, ctx)
        return number


class Real(click.FloatRange):
    """A number: neither infinite nor NaN."""

    name = "number"

    def _describe_range(self) -> str:
        return _described(self, super()._describe_range())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class Length(Int):
    """Tokens of an answer, 0: no limit; llama.cpp's -1 is 0."""

    def __init__(self) -> None:
        super().__init__(min=-1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return max(super().convert(value, param, ctx), 0)


COUNT = Int(min=1)
SIZE = Int(min=0)
SEED: Any = click.IntRange(0, 2**32 - 1)
