"""llama.cpp's grammars, GBNF (its grammars/README.md and src/llama-grammar.cpp), as llguidance takes them.

llama.cpp follows every way in which a text can be read at once, which may be twice as many with each character, and it
cannot be stopped; llguidance reads with Earley's algorithm, and a step that takes too much is an error. Its lexer takes
the longest word that fits, so here a word is one character: whatever GBNF can be read as, the Lark grammar can.

llguidance's limits count items and not time, and it recurses from rule to rule. So what is deep, or may be empty in
very many ways, is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Union

from pyfly_cpp.grammar.schemas import SchemaGrammar

_MOST_REPEATED = 2000
"""As in llama.cpp, also of repetitions within each other."""
_MOST_RULES = 1000
"""With parts that become rules."""
_DEEPEST = 50
"""Parentheses within each other."""
_MOST_EMPTY, _MOST_EMPTY_REPEATED = 64, 20
"""Parts in a row that may be empty, and repetitions of one: each is a place where every next character may stand."""
_MOST_SIGNS = 8
"""Of repetition behind one part."""
_LAST = 0x10FFFF

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DEFINED_AS = re.compile(r"::=")
_NUMBER = re.compile(r"[0-9]+")
_BLANK, _BLANK_LINES = re.compile(r"(?:[ \t]|\#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|\#[^\r\n]*)*")
_NEWLINE = re.compile(r"\r\n|\r|\n|\Z")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Range(NamedTuple):
    first: int
    last: int


class _Chars(NamedTuple):
    """One character of these."""

    ranges: tuple[_Range, ...]


class _Row(NamedTuple):
    """One part after the other."""

    parts: tuple[_Part, ...]


class _Choice(NamedTuple):
    alternatives: tuple[_Part, ...]


class _Times(NamedTuple):
    part: _Part
    least: int
    most: int | None


class _Rule(NamedTuple):
    """A reference."""

    number: int


_Part = Union[_Chars, _Row, _Choice, _Times, _Rule]

_SURROGATES = _Range(0xD800, 0xDFFF)


def from_gbnf(text: str) -> SchemaGrammar:
    """The grammar of the rule `root`. Raises ValueError: it is none, or asks for too much; the message stands behind
    the name of a field."""
    return SchemaGrammar(_Writer(_Reader(text).read()).write(), is_by_character=True)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._numbers: dict[str, int] = {"root": 0}
        self._rules: dict[int, _Part] = {}

    def read(self) -> dict[int, _Part]:
        """The rules by their numbers, `root` is 0. The last definition of a name counts."""
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
        if 0 not in self._rules:
            raise ValueError("has no rule `root`")
        used = {number for rule in self._rules.values() for number in _references(rule)}
        unknown = next((name for name, number in self._numbers.items() if number in used - self._rules.keys()), None)
        if unknown is not None:
            raise ValueError(f"refers to the rule {unknown[:40]!r}, which it does not have")
        return self._rules

    # ---- What stands in a rule ---------------------------------------------------------------------------------------

    def _alternatives(self, blank: re.Pattern[str]) -> _Part:
        """`blank`: what may stand between the parts of one of them."""
        found = [self._sequence(blank)]
        while self._next() == "|":
            self._at += 1
            self._skip(_BLANK_LINES)
            found.append(self._sequence(blank))
        return _Choice(tuple(found)) if len(found) > 1 else found[0]

    def _sequence(self, blank: re.Pattern[str]) -> _Part:
        found, n_signs = list[_Part](), 0
        parts: dict[str, Callable[[], _Part]] = {
            '"': self._literal, "[": self._class, "(": self._group, ".": lambda: _Chars(_others(()))
        }  # fmt: skip
        while char := self._next():
            if char in parts:
                self._at += 1
                found.append(parts[char]())
                n_signs = 0
            elif _NAME.match(char):
                found.append(_Rule(self._number(self._take(_NAME, "a name"))))
                n_signs = 0
            elif char in "*+?{":
                self._at += 1
                n_signs += 1
                if not found:
                    raise self._wrong(f"something before {char!r}")
                if n_signs > _MOST_SIGNS:
                    raise ValueError(f"has more than {_MOST_SIGNS} signs of repetition in a row")
                found[-1] = _Times(found[-1], *(_TIMES.get(char) or self._times(blank)))
            elif char in "<!":
                raise ValueError("names a token, which this server does not follow; write the token's text")
            else:
                break
            self._skip(blank)
        return found[0] if len(found) == 1 else _Row(tuple(found))

    def _literal(self) -> _Part:
        found = []
        while self._next() != '"':
            char = self._char()
            found.append(_Chars(_known((_Range(char, char),))))
        self._at += 1
        return _Row(tuple(found))

    def _class(self) -> _Part:
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
        if not found:  # llama.cpp takes it for nothing, also with ^
            return _Row(())
        return _Chars(_others(found) if is_other else _known(found))

    def _group(self) -> _Part:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"has more than {_DEEPEST} parentheses within each other")
        self._skip(_BLANK_LINES)
        inner = self._alternatives(_BLANK_LINES)
        if self._next() != ")":
            raise self._wrong("`)`")
        self._at += 1
        self._depth -= 1
        return inner

    def _times(self, blank: re.Pattern[str]) -> tuple[int, int | None]:
        """What stands behind `{`. More than llama.cpp's limit is no limit, as there."""
        self._skip(blank)
        least = _count(self._take(_NUMBER, "a number"))
        most: int | None = least
        self._skip(blank)
        if self._next() == ",":
            self._at += 1
            self._skip(blank)
            number = _NUMBER.match(self._text, self._at)
            most = _count(number.group()) if number else None
            self._at = number.end() if number else self._at
            self._skip(blank)
        if self._next() != "}":
            raise self._wrong("`}`")
        self._at += 1
        if least > _MOST_REPEATED:
            raise ValueError(f"repeats something more than {_MOST_REPEATED} times")
        if most is not None and most < least:
            raise ValueError(f"repeats something at least {least} and at most {most} times")
        return least, None if most is not None and most > _MOST_REPEATED else most

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


def _count(digits: str) -> int:
    """A number, but for those that are too large anyway."""
    return int(digits.lstrip("0")[: len(str(_MOST_REPEATED)) + 1] or "0")


def _references(part: _Part) -> Iterator[int]:
    if isinstance(part, _Rule):
        yield part.number
    for one in _inner(part):
        yield from _references(one)


def _inner(part: _Part) -> tuple[_Part, ...]:
    if isinstance(part, _Row):
        return part.parts
    if isinstance(part, _Choice):
        return part.alternatives
    return (part.part,) if isinstance(part, _Times) else ()


class _Writer:
    """Rules as Lark."""

    def __init__(self, rules: dict[int, _Part]) -> None:
        self._rules = rules
        self._is_ended = dict.fromkeys(rules, False)  # whether a rule has a text that ends
        self._may_be_empty = dict.fromkeys(rules, False)
        self._written: list[str] = []
        self._fix(self._is_ended, self._ends)
        self._fix(self._may_be_empty, self._is_empty)

    def write(self) -> str:
        """Raises ValueError: it asks for too much, or no text follows it."""
        if not self._is_ended[0]:
            raise ValueError("has no text that ends")
        for number, rule in self._rules.items():
            if self._is_ended[number]:
                self._put(f"r{number}", rule)
        return "\n".join(["%llguidance {}", "start: r0", *self._written]) + "\n"

    def _put(self, name: str, part: _Part) -> None:
        at = len(self._written)
        self._written.append("")
        if len(self._written) > _MOST_RULES:
            raise ValueError(f"has more than {_MOST_RULES} rules and parts; make it simpler")
        alternatives = part.alternatives if isinstance(part, _Choice) else (part,)
        self._written[at] = f"{name}: " + " | ".join(self._row(one) for one in alternatives if self._ends(one))

    def _row(self, part: _Part) -> str:
        parts, n_empty = part.parts if isinstance(part, _Row) else (part,), 0
        for one in parts:
            n_empty = n_empty + 1 if self._is_empty(one) else 0
            if n_empty > _MOST_EMPTY:
                raise ValueError(f"has more than {_MOST_EMPTY} parts in a row that may be empty; make it simpler")
        return " ".join(map(self._atom, parts)) or '""'

    def _atom(self, part: _Part) -> str:
        """A part in one word, or several that no sign is to follow."""
        if isinstance(part, _Chars):
            return _one_of(part.ranges)
        if isinstance(part, _Rule):
            return f"r{part.number}"
        if isinstance(part, _Row) and all(isinstance(one, _Chars) for one in part.parts):
            return " ".join(map(self._atom, part.parts)) or '""'
        if not isinstance(part, _Times):
            return self._named(part)
        least, most = part.least, part.most
        if most == 0 or not self._ends(part.part):
            return '""'
        if _weight(part) > _MOST_REPEATED:
            raise ValueError(f"repeats something more than {_MOST_REPEATED} times, all repetitions together")
        if self._is_empty(part.part) and max(least, most or 0) > _MOST_EMPTY_REPEATED:
            raise ValueError(f"repeats what may be empty more than {_MOST_EMPTY_REPEATED} times; make it simpler")
        one = self._atom(part.part) if isinstance(part.part, (_Chars, _Rule)) else self._named(part.part)
        sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
        return one + (sign or f"{{{least},{'' if most is None else most}}}")

    def _named(self, part: _Part) -> str:
        name = f"p{len(self._written)}"
        self._put(name, part)
        return name

    # ---- What is true of a part, as of what it refers to -------------------------------------------------------------

    def _fix(self, known: dict[int, bool], is_so: Callable[[_Part], bool]) -> None:
        """Sets what `is_so` of each rule, which asks `known` about others: the least that agrees with itself."""
        is_new = True
        while is_new:
            is_new = False
            for number in reversed(self._rules):
                if not known[number] and is_so(self._rules[number]):
                    known[number] = is_new = True

    def _ends(self, part: _Part) -> bool:
        if isinstance(part, _Chars):
            return bool(part.ranges)
        if isinstance(part, _Rule):
            return self._is_ended[part.number]
        if isinstance(part, _Times):
            return part.least == 0 or self._ends(part.part)
        return (any if isinstance(part, _Choice) else all)(map(self._ends, _inner(part)))

    def _is_empty(self, part: _Part) -> bool:
        if isinstance(part, _Chars):
            return False
        if isinstance(part, _Rule):
            return self._may_be_empty[part.number]
        if isinstance(part, _Times):
            return part.least == 0 or self._is_empty(part.part)
        return (any if isinstance(part, _Choice) else all)(map(self._is_empty, _inner(part)))


def _weight(part: _Part) -> int:
    """How many parts it is without repetitions."""
    n = max(1, sum(map(_weight, _inner(part))))
    return n * max(1, part.least, part.most or 0) if isinstance(part, _Times) else n


def _others(ranges: Iterable[_Range]) -> tuple[_Range, ...]:
    """All characters but these, in order. NUL and halves of surrogate pairs are none."""
    found, begin = list[_Range](), 1
    for one in sorted([*ranges, _SURROGATES]):
        if one.last >= one.first:
            found.append(_Range(begin, one.first - 1))
            begin = max(begin, one.last + 1)
    return tuple(one for one in [*found, _Range(begin, _LAST)] if one.first <= one.last)


def _known(ranges: Iterable[_Range]) -> tuple[_Range, ...]:
    """These, as far as they are characters."""
    return _others(_others(ranges))


def _one_of(ranges: tuple[_Range, ...]) -> str:
    """A pattern for one character."""
    if len(ranges) == 1 and ranges[0].first == ranges[0].last and (char := chr(ranges[0].first)).isalnum():
        return f'"{char}"'
    return "/[" + "".join(f"\\x{{{one.first:x}}}-\\x{{{one.last:x}}}" for one in ranges) + "]/"
