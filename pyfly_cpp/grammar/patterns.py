"""The `pattern` of a JSON schema as a grammar: which JSON strings a regular expression stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

Ranges = list[tuple[int, int]]
"""Code points, as (first, last), in ascending order and apart."""

_LAST = 0x10FFFF
_MOST_NESTED = 64  # llama.cpp's reader of grammars calls itself for each
MOST_TIMES = 2000
"""How often llama.cpp's reader of grammars repeats something, at most; what makes rules counts for each of them."""
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|.)"
_TOKEN = re.compile(
    rf"(?P<set>\[(?:{_ESCAPE}|[^\]\\])*\])|(?P<repeat>(?:[*+?]|\{{\d+(?:,\d*)?\}})\??)"
    rf"|(?P<open>\((?:\?:|\?<[A-Za-z_]\w*>)?)|(?P<close>\))|(?P<or>\|)|(?P<anchor>[$^])|(?P<dot>\.)"
    rf"|(?P<char>{_ESCAPE}|[^\\])",
    re.DOTALL,
)
_MEMBER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)

_CLASSES: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
          (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
}  # fmt: skip
_LINE_ENDS: Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_CONTROLS = {"n": 0xA, "r": 0xD, "t": 0x9, "f": 0xC, "v": 0xB, "0": 0x0}
_NEVER_RAW: Ranges = [(0x0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
"""What strict JSON has in no string as it is."""
_SHORT = {0x22: '"', 0x5C: "\\", 0x8: "b", 0x9: "t", 0xA: "n", 0xC: "f", 0xD: "r"}


def pattern_rule(pattern: str) -> str:
    """The right side of a GBNF rule for what stands between the quotes of a JSON string that matches.

    Raises:
        ValueError: the expression is none, or has something that a grammar cannot express (lookaround, references to
            groups, word boundaries, more than `MOST_TIMES` repetitions).
    """
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    rule = f"({_inner_rule(inner, pattern)})"
    # As written, it may match anywhere.
    return f"{'' if begins else 'char* '}{rule}{'' if ends else ' char*'}"


def _inner_rule(inner: str, pattern: str) -> str:
    out: list[str] = []
    depth, repeatable = 0, False
    n_rules = [0]  # that llama.cpp makes of the brackets that are open
    n_of_last = 0
    for kind, text in _tokens(inner, pattern):
        if kind == "repeat" and repeatable:
            # How many it takes first decides nothing here.
            out[-1] += text[0] if text[0] in "*+?" else text.rstrip("?")
            n_rules[-1] += _rules_of_repeat(text, max(n_of_last, 1), pattern)
        elif kind == "open" and depth < _MOST_NESTED:
            out.append("(")
        elif kind == "close" and depth > 0:
            out.append(")")
        elif kind == "or":
            out.append("|")
        elif kind == "dot":
            out.append(_rule_of(_complement(_LINE_ENDS)))
        elif kind == "set":
            out.append(_rule_of(_set(text, pattern)))
        elif kind == "char":
            out.append(_rule_of(_member(text, pattern)))
        else:
            raise ValueError(f"the pattern {pattern!r} has {text!r} in a place that a grammar cannot express")
        depth += {"open": 1, "close": -1}.get(kind, 0)
        if kind == "open":
            n_rules.append(0)
        elif kind != "repeat":
            n_of_last = 1 + n_rules.pop() if kind == "close" else out[-1].count("(")
            n_rules[-1] += n_of_last
        repeatable = kind in ("close", "dot", "set", "char")
    if depth:
        raise ValueError(f"the pattern {pattern!r} has a bracket that is not closed")
    return " ".join(out)


def _rules_of_repeat(text: str, n_rules: int, pattern: str) -> int:
    """How many rules a quantifier makes behind something of which so many are made."""
    if text[0] in "*+?":
        return 1
    low, _, high = text.rstrip("?").strip("{}").partition(",")
    first, last = int(low), int(high or low)
    if last < first:
        raise ValueError(f"the pattern {pattern!r} has {text!r}, which ends before it begins")
    if last * n_rules > MOST_TIMES:
        raise ValueError(f"the pattern {pattern!r} repeats too often for a grammar")
    return 1 if "," in text and not high else last - first


def _tokens(inner: str, pattern: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of what an expression consists of."""
    place = 0
    while place < len(inner):
        match = _TOKEN.match(inner, place)
        if match is None or match[0] == "[":
            raise ValueError(f"the pattern {pattern!r} has {inner[place]!r} without its counterpart")
        assert match.lastgroup is not None
        yield match.lastgroup, match[0]
        place = match.end()


def _set(text: str, pattern: str) -> Ranges:
    """The characters of `[...]`."""
    is_negated = text.startswith("[^")
    members = _MEMBER.findall(text[2:-1] if is_negated else text[1:-1])
    found: Ranges = []
    while members:
        own = _member(members.pop(0), pattern, in_set=True)
        if len(members) > 1 and members[0] == "-":
            last = _member(members[1], pattern, in_set=True)
            if own[0][0] == own[-1][1] and last[0][0] == last[-1][1]:  # else the hyphen is a member
                if own[0][0] > last[0][0]:
                    raise ValueError(f"the pattern {pattern!r} has a range that ends before it begins")
                own = [(own[0][0], last[0][0])]
                del members[:2]
        found += own
    ranges = _complement(_united(found)) if is_negated else _united(found)
    if not ranges:
        raise ValueError(f"the pattern {pattern!r} has {text!r}, which nothing matches")
    return ranges


def _member(text: str, pattern: str, in_set: bool = False) -> Ranges:
    """The characters that a character or an escape stands for."""
    code = ord(text[-1])
    if text[0] == "\\":
        name = text[1]
        if name in _CLASSES:
            return _CLASSES[name]
        if name.lower() in _CLASSES:
            return _complement(_CLASSES[name.lower()])
        if len(text) > 2:
            code = int(text[2:].strip("{}"), 16)
        elif name in _CONTROLS:
            code = _CONTROLS[name]
        elif name == "b" and in_set:
            code = 0x8
        elif name.isalnum():
            raise ValueError(f"the pattern {pattern!r} has {text!r}, which a grammar cannot express")
    if 0xD800 <= code <= 0xDFFF or code > _LAST:
        raise ValueError(f"the pattern {pattern!r} has {text!r}, which is no character")
    return [(code, code)]


def _united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    out: Ranges = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out


def _complement(ranges: Ranges) -> Ranges:
    starts = [0, *(last + 1 for _, last in ranges)]
    ends = [*(first - 1 for first, _ in ranges), _LAST]
    return [(first, last) for first, last in zip(starts, ends) if first <= last]


def _rule_of(ranges: Ranges) -> str:
    """The rule for one of these characters in a JSON string: as it is, or escaped if it must be."""
    raw = _complement(_united([*_complement(ranges), *_NEVER_RAW]))
    inside = {code for first, last in ranges for code in range(first, min(last, 0x5C) + 1)}
    rules = [f"[{''.join(map(_range, raw))}]"] if raw else []
    short = [escaped(ord(letter)) for code, letter in _SHORT.items() if code in inside]
    escapes = [f"[{''.join(short)}]"] if short else []
    for high in (0, 1):
        digits = [f"{low:x}" for low in range(16) if 16 * high + low in inside]
        escapes += [f'"u00{high}" [{"".join(digits)}]'] if digits else []
    rules += [f'"\\\\" ({" | ".join(escapes)})'] if escapes else []
    return rules[0] if len(rules) == 1 and raw else f"({' | '.join(rules)})"


def _range(ends: tuple[int, int]) -> str:
    first, last = map(escaped, ends)
    return first if first == last else f"{first}-{last}"


def escaped(code: int) -> str:
    """A character as classes and literals of a GBNF grammar can have it."""
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\U{code:08X}"
