"""llama.cpp's grammars, GBNF (its grammars/README.md and src/llama-grammar.cpp), as llguidance takes them.

llama.cpp follows every way in which a text can be read at once, which may be twice as many with each character, and it
cannot be stopped; llguidance reads with Earley's algorithm, and a step that takes too much is an error. Its lexer takes
the longest word that fits, so here a word is one character: whatever GBNF can be read as, the Lark grammar can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pyfly_cpp.grammar.schemas import SchemaGrammar

_MOST_REPEATED = 2000
"""As in llama.cpp."""
_DEEPEST = 100
"""Parentheses within each other."""
_LAST = 0x10FFFF

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DEFINED_AS = re.compile(r"::=")
_NUMBER = re.compile(r"[0-9]{1,9}")
_BLANK, _BLANK_LINES = re.compile(r"(?:[ \t]|\#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|\#[^\r\n]*)*")
_NEWLINE = re.compile(r"\r\n|\r|\n|\Z")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Range(NamedTuple):
    first: int
    last: int


_SURROGATES = _Range(0xD800, 0xDFFF)


def from_gbnf(text: str) -> SchemaGrammar:
    """The grammar of the rule `root`. Raises ValueError: it is none; the message stands behind the name of a field."""
    return SchemaGrammar(_Reader(text).read(), is_by_character=True)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._numbers: dict[str, int] = {}
        self._rules: dict[int, str] = {}  # what stands behind its colon; the last definition counts

    def read(self) -> str:
        """In Lark."""
        self._skip(_BLANK_LINES)
        while self._at < len(self._text):
            number = self._number(self._take(_NAME, "the name of a rule"))
            self._skip(_BLANK)
            self._take(_DEFINED_AS, "`::=`")
            self._skip(_BLANK_LINES)
            self._rules[number] = self._alternatives(_BLANK)
            if not self._skip(_NEWLINE):
                raise self._wrong("the end of a line")
            self._skip(_BLANK_LINES)
        unknown = next((name for name, number in self._numbers.items() if number not in self._rules), None)
        if unknown is not None:
            raise ValueError(f"refers to the rule {unknown[:40]!r}, which it does not have")
        if "root" not in self._numbers:
            raise ValueError("has no rule `root`")
        rules = [f"r{number}: {rule}" for number, rule in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: r{self._numbers['root']}", *rules]) + "\n"

    # ---- What stands in a rule ---------------------------------------------------------------------------------------

    def _alternatives(self, blank: re.Pattern[str]) -> str:
        """`blank`: what may stand between the parts of one of them."""
        found = [self._sequence(blank)]
        while self._next() == "|":
            self._at += 1
            self._skip(_BLANK_LINES)
            found.append(self._sequence(blank))
        return " | ".join(found)

    def _sequence(self, blank: re.Pattern[str]) -> str:
        found = list[str]()
        parts: dict[str, Callable[[], str]] = {
            '"': self._literal, "[": self._class, "(": self._group, ".": self._any
        }  # fmt: skip
        while char := self._next():
            if char in parts:
                self._at += 1
                found.append(parts[char]())
            elif _NAME.match(char):
                found.append(f"r{self._number(self._take(_NAME, 'a name'))}")
            elif char in "*+?{":
                self._at += 1
                if not found:
                    raise self._wrong(f"something before {char!r}")
                found[-1] = self._repeated(found[-1], *(_TIMES.get(char) or self._times(blank)))
            elif char in "<!":
                raise ValueError("names a token, which this server does not follow; write the token's text")
            else:
                break
            self._skip(blank)
        return " ".join(found) or '""'

    def _literal(self) -> str:
        found = []
        while self._next() != '"':
            char = self._char()
            found.append(_one_of([_Range(char, char)]))
        self._at += 1
        return f"({' '.join(found)})" if found else '""'

    def _class(self) -> str:
        is_other = self._next() == "^"
        self._at += is_other
        found = []
        while self._next() != "]":
            first = last = self._char()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
            found.append(_Range(first, last))
        self._at += 1
        return _one_of(_others(found) if is_other else found)

    def _any(self) -> str:
        return _one_of(_others([]))

    def _group(self) -> str:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"has more than {_DEEPEST} parentheses within each other")
        self._skip(_BLANK_LINES)
        inner = self._alternatives(_BLANK_LINES)
        if self._next() != ")":
            raise self._wrong("`)`")
        self._at += 1
        self._depth -= 1
        return f"({inner})"

    def _times(self, blank: re.Pattern[str]) -> tuple[int, int | None]:
        """What stands behind `{`."""
        self._skip(blank)
        least = int(self._take(_NUMBER, "a number"))
        most: int | None = least
        self._skip(blank)
        if self._next() == ",":
            self._at += 1
            self._skip(blank)
            number = _NUMBER.match(self._text, self._at)
            most = int(number.group()) if number else None
            self._at = number.end() if number else self._at
            self._skip(blank)
        if self._next() != "}":
            raise self._wrong("`}`")
        self._at += 1
        return least, most

    def _repeated(self, what: str, least: int, most: int | None) -> str:
        if max(least, most or 0) > _MOST_REPEATED:
            raise ValueError(f"repeats something more than {_MOST_REPEATED} times")
        if most is not None and most < least:
            raise ValueError(f"repeats something at least {least} and at most {most} times")
        return f"({what}){{{least},{'' if most is None else most}}}"

    # ---- Characters --------------------------------------------------------------------------------------------------

    def _char(self) -> int:
        """The code of the next one, which may be escaped."""
        char = self._next()
        if not char:
            raise self._wrong('`"` or `]`')
        self._at += 1
        if char == "\\":
            kind = self._next()
            self._at += 1
            if kind in _HEX:
                digits = self._text[self._at : self._at + _HEX[kind]]
                self._at += len(digits)
                if len(digits) == _HEX[kind] and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                    return int(digits, 16)
                raise self._wrong(f"{_HEX[kind]} hexadecimal digits")
            if kind not in _ESCAPED:
                raise self._wrong("an escape of GBNF")
            char = _ESCAPED[kind]
        return ord(char)

    def _next(self) -> str:
        """The next character; empty at the end of the text, which nothing that was opened may have."""
        return self._text[self._at : self._at + 1]

    def _skip(self, what: re.Pattern[str]) -> bool:
        found = what.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found is not None

    def _take(self, what: re.Pattern[str], name: str) -> str:
        found = what.match(self._text, self._at)
        if not found:
            raise self._wrong(name)
        self._at = found.end()
        return found.group()

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _wrong(self, expected: str) -> ValueError:
        there = self._text[self._at : self._at + 20]
        where = f"before {there!r}" if there else "at its end"
        return ValueError(f"is no GBNF: {expected} is missing {where}")


def _others(ranges: Iterable[_Range]) -> list[_Range]:
    """All characters but these, in order. NUL and halves of surrogate pairs are none."""
    found, begin = list[_Range](), 1
    for one in sorted([*ranges, _SURROGATES]):
        if one.last >= one.first:
            found.append(_Range(begin, one.first - 1))
            begin = max(begin, one.last + 1)
    return [one for one in [*found, _Range(begin, _LAST)] if one.first <= one.last]


def _one_of(ranges: Iterable[_Range]) -> str:
    """A pattern for one character. Raises ValueError: there is none."""
    known = _others(_others(ranges))
    if not known:
        raise ValueError("has characters, or a class of them, that no text can have")
    if len(known) == 1 and known[0].first == known[0].last and (char := chr(known[0].first)).isalnum():
        return f'"{char}"'
    return "/[" + "".join(f"\\x{{{one.first:x}}}-\\x{{{one.last:x}}}" for one in known) + "]/"
