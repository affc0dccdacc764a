"""JSON schemas as grammars whose texts are strict JSON.

llama-cpp-python's converter gives texts that no strict reader takes, and fails on schemas that pydantic makes; so ours
is used for the answers of chats, and instead of those that its chat formats convert themselves.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from pyfly_cpp.grammar.constants import ANNOTATIONS, are_same, keeps, kind_of
from pyfly_cpp.grammar.numbers import decimals, integers
from pyfly_cpp.grammar.patterns import MOST_TIMES, escaped, pattern_rule

_PAIR = r'[dD] [89abAB] [0-9a-fA-F] [0-9a-fA-F] "\\u" [dD] [c-fC-F] [0-9a-fA-F] [0-9a-fA-F]'
_UNIT = r"[0-9a-ce-fA-CE-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] | [dD] [0-7] [0-9a-fA-F] [0-9a-fA-F]"
CHARACTER = rf'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" ({_UNIT} | {_PAIR}))'
"""One character in a JSON string: no control character, no half of a surrogate pair."""

_PRIMITIVES = rf"""space ::= " "?
char ::= {CHARACTER}
string ::= "\"" char* "\""
integer ::= {integers(None, None)}
number ::= {decimals(None, None)} ([eE] [-+]? [0-9]{{1,2}})?
boolean ::= "true" | "false"
null ::= "null"
object ::= "{{" space (string space ":" space value space ("," space string space ":" space value space)*)? "}}"
array ::= "[" space (value space ("," space value space)*)? "]"
value ::= object | array | string | number | boolean | null"""

_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_KEYWORDS = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems")),
    "string": frozenset(("pattern", "format", "minLength", "maxLength")),
    "number": _BOUNDS,
    "integer": _BOUNDS,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
"""The keywords of each type that a grammar can follow."""

_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z\d]{1,20}(-[A-Za-z\d]{1,20}){0,2}"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_SECONDS = r"\d{1,2}S"
_MINUTES = rf"(\d{{1,2}}M({_SECONDS})?|{_SECONDS})"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(\d{{1,4}}D|(\d{{1,4}}D)?T(\d{{1,3}}H{_MINUTES}?|{_MINUTES}))",
    **dict.fromkeys(("uuid", *(f"uuid{n}" for n in range(1, 6))), r"[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}"),
    "email": rf"[\w+-]{{1,64}}(\.[\w+-]{{1,64}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": r"[\da-f]{1,4}(:[\da-f]{1,4}){7}",
    "uri": r"[a-z][a-z\d+.-]*:[\w!#$&'()*+,./:;=?@~-]+",
}
"""Texts that certainly have a format, and not all of them."""

_MOST_NESTED = 100


class SchemaGrammar(NamedTuple):
    """The result of a schema."""

    text: str
    """GBNF."""
    loose: tuple[str, ...]
    """Rules that the grammar does not enforce: keywords behind the names of the properties that they stand at."""


class Framed(NamedTuple):
    """A schema, and what stands around the value that follows it."""

    schema: Any
    opening: str = ""
    closing: str = ""
    name: str = ""
    """For people."""


def schema_from(text: str) -> Any:
    """A schema in its written form. Raises ValueError: it is no JSON."""
    return json.loads(text, parse_constant=_refuse)


def gbnf_of(schema: Any) -> SchemaGrammar:
    """The grammar of a JSON schema. Properties come in the order of the schema.

    Raises:
        ValueError: it is none, refers to what is not there, or nothing follows it. The message stands behind a name
            for the schema.
    """
    return gbnf_of_any([Framed(schema)])


def gbnf_of_any(framed: Sequence[Framed], is_repeated: bool = False) -> SchemaGrammar:
    """The grammar of texts that follow one of some schemas; as of `gbnf_of`.

    Args:
        is_repeated: Whether there may be several in a line each.
    """
    roots, rules, loose = [], [], list[str]()
    for i, own in enumerate(framed):
        converter = _Converter(own.schema, f"s{i}-")
        path = f"{own.name}: " if own.name else ""
        try:
            root = converter.visit(own.schema, "")
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            reason = {ValueError: str(error), RecursionError: "is nested too deep"}.get(
                type(error), "is not a JSON schema: a keyword has a value of the wrong type"
            )
            raise ValueError(f"has {own.name!r}, whose schema {reason}" if own.name else reason) from None
        roots.append(" ".join((_literal(own.opening), root, "space", _literal(own.closing))))
        rules += [f"{name} ::= {rule}" for name, rule in converter.rules.items()]
        loose += [path + word for word in converter.loose]
    root = 'one ("\\n" one)*' if is_repeated else "one"
    text = "\n".join((f"root ::= {root}", f"one ::= {' | '.join(roots)}", *rules, _PRIMITIVES))
    return SchemaGrammar(text, tuple(dict.fromkeys(loose)))


class _Converter:
    """Rules for one schema."""

    def __init__(self, root: Any, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self.rules: dict[str, str] = {}
        self.loose: list[str] = []
        self._names: dict[str, str] = {}
        self._references: dict[str, str] = {}
        self._open: set[tuple[str, str]] = set()
        self._n_nested = 0

    def visit(self, schema: Any, path: str) -> str:
        """The name of the rule for a schema; `path`: of the schema, for people."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise ValueError(f"is not a JSON schema: at {path or 'its top'} stands {json.dumps(schema)[:40]}")
        self._n_nested += 1
        if self._n_nested > _MOST_NESTED:
            raise ValueError("is nested too deep")
        try:
            return self._visit(schema, path)
        finally:
            self._n_nested -= 1

    def _visit(self, schema: dict[str, Any], path: str) -> str:
        own = _with_numeric_bounds({word: value for word, value in schema.items() if word not in ANNOTATIONS})
        if "const" in own or "enum" in own:
            return self._listed(own, path)
        reference, parts = own.pop("$ref", None), own.pop("allOf", [])
        if reference is not None:
            return self._reference(reference, own, parts, path)
        if len(parts) == 1 and not own:
            return self.visit(parts[0], path)
        if parts:
            return self.visit(self._all(own, parts, path), path)
        for word in ("anyOf", "oneOf"):
            if word in own:
                rest = {other: value for other, value in own.items() if other != word}
                if word == "oneOf" and not self._exclude_each_other(own[word]):
                    if (values := _listed_by(own[word])) is not None:
                        return self._listed({"enum": values, **own}, path)
                    self._tell(path, [word])
                return self._union(self.visit(self._both(part, rest, path), path) for part in own[word])
        kind = own.pop("type", None)
        if isinstance(kind, list):
            return self._union(self.visit({**_of_type(own, one), "type": one}, path) for one in kind)
        if kind is None:
            kind = next((kind for kind, words in _KEYWORDS.items() if own.keys() & words), None)
        elif kind not in _KEYWORDS:
            raise ValueError(f"is not a JSON schema: the type at {path or 'its top'} is {json.dumps(kind)[:40]}")
        self._tell(path, own.keys() - _KEYWORDS.get(kind or "", frozenset()))
        written = getattr(self, f"_{kind}", None)
        return (kind or "value") if written is None or not own.keys() & _KEYWORDS[kind] else written(own, path)

    def _tell(self, path: str, words: Iterable[str]) -> None:
        self.loose += [f"{path}.{word}".lstrip(".") for word in sorted(words)]

    def _rule(self, rule: str) -> str:
        if rule not in self._names:
            self._names[rule] = f"{self._prefix}{len(self._names)}"
            self.rules[self._names[rule]] = rule
        return self._names[rule]

    def _union(self, rules: Iterable[str]) -> str:
        among = list(dict.fromkeys(rules))
        if not among:
            raise ValueError("has a choice of nothing")
        return self._rule(" | ".join(among))

    def _listed(self, own: dict[str, Any], path: str) -> str:
        """The rule for values that are listed, those that keep to the other keywords."""
        values = [own["const"]] if "const" in own else own["enum"]
        words = [word for word in own if word != ("const" if "const" in own else "enum")]
        kept, unknown = list[Any](), set[str]()
        for value in values:
            known = {word: keeps(value, word, own, self._target) for word in words}
            if False not in known.values():
                kept.append(value)
                unknown |= {word for word, keeps_to in known.items() if keeps_to is None}
        self._tell(path, unknown)
        return self._union(_literal(as_json(value)) for value in kept)

    def _exclude_each_other(self, parts: Sequence[Any]) -> bool:
        """Whether no value certainly follows two of some schemas: by their types, or by a property that one of them
        requires and both list the values of."""
        known = [self._resolved(part) for part in parts]
        return all(self._exclude(one, other) for i, one in enumerate(known) for other in known[:i])

    def _exclude(self, first: Any, second: Any) -> bool:
        if not isinstance(first, dict) or not isinstance(second, dict):
            return False
        kinds = [_kinds_of(schema) for schema in (first, second)]
        if all(kinds) and kinds[0].isdisjoint(kinds[1]):
            return True
        if kinds != [{"object"}] * 2:
            return False
        own, others = first.get("properties") or {}, second.get("properties") or {}
        for name in {*(first.get("required") or ()), *(second.get("required") or ())} & own.keys() & others.keys():
            values = [_listed_by([self._resolved(properties[name])]) for properties in (own, others)]
            if values[0] is not None and values[1] is not None:
                return not any(are_same(one, other) for one in values[0] for other in values[1])
        return False

    def _resolved(self, schema: Any) -> Any:
        """What a schema that is nothing but references leads to."""
        for _ in range(_MOST_NESTED):
            if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS != {"$ref"}:
                break
            schema = self._target(schema["$ref"])
        return schema

    # ---- References and parts ----------------------------------------------------------------------------------------

    def _target(self, reference: Any) -> Any:
        target = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(f"refers to {str(reference)[:80]!r}, which is outside of it; put it into $defs")
        for key in unquote(reference[1:]).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise ValueError(f"refers to {reference[:80]!r}, which it does not have")
        return target

    def _reference(self, reference: Any, own: dict[str, Any], parts: list[Any], path: str) -> str:
        """The rule for a reference and what stands beside it; for the same again the same, so that it may recur."""
        key = json.dumps([reference, own, parts])
        if key not in self._references:
            target = self._target(reference)
            name = self._references[key] = f"{self._prefix}ref{len(self._references)}"
            together = self._all(own, [target, *parts], path) if own or parts else target
            self._open.add((key, path))
            self.rules[name] = self.visit(together, path)
            self._open.remove((key, path))
        elif (key, path) in self._open:
            raise ValueError(f"refers to itself at {path or 'its top'}, with no value in between")
        return self._references[key]

    def _all(self, own: dict[str, Any], parts: Iterable[Any], path: str) -> Any:
        return functools.reduce(lambda first, second: self._both(first, second, path), parts, own)

    def _both(self, first: Any, second: Any, path: str) -> Any:
        """One schema for what must follow two."""
        if not isinstance(first, dict) or not isinstance(second, dict):
            return second if first is True or not first else first
        out = _with_numeric_bounds(dict(first))
        for word, value in _with_numeric_bounds(dict(second)).items():
            given: Any = out.setdefault(word, value)
            if word in ANNOTATIONS or given == value:
                continue
            if word == "properties":
                shared = {name: {"allOf": [given[name], value[name]]} for name in given.keys() & value.keys()}
                out[word] = {**given, **value, **shared}
            elif word == "required":
                out[word] = list(dict.fromkeys((*given, *value)))
            elif word == "additionalProperties":
                out[word] = given is not False and value is not False and {"allOf": [given, value]}
            elif word in ("minimum", "exclusiveMinimum", "minLength", "minItems"):
                out[word] = max(given, value)
            elif word in ("maximum", "exclusiveMaximum", "maxLength", "maxItems"):
                out[word] = min(given, value)
            elif word == "allOf":
                out[word] = [*given, *value]
            elif word in ("$ref", "anyOf", "oneOf", "enum", "const"):
                out["allOf"] = [*out.get("allOf", []), {word: value}]
            elif word == "type":
                kinds = given if isinstance(given, list) else [given]
                others = value if isinstance(value, list) else [value]
                out[word] = [kind for kind in kinds if kind in others or (kind == "integer" and "number" in others)]
                if "integer" in others and "number" in kinds and "number" not in others:
                    out[word] = list(dict.fromkeys([*out[word], "integer"]))
            else:
                self._tell(path, [word])
        return out

    # ---- Types -------------------------------------------------------------------------------------------------------

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        own, required = schema.get("properties") or {}, list(schema.get("required") or ())
        more = schema.get("additionalProperties", "properties" not in schema)
        pairs = []
        for name in dict.fromkeys((*own, *required)):
            value = self.visit(own.get(name, True), f"{path}.{name}".lstrip("."))
            pairs.append((self._rule(f'{_literal(as_json(name))} space ":" space {value} space'), name in required))
        if more is not False:
            pair = self._rule(f'string space ":" space {self.visit(more, path)} space')
            pairs.append((self._rule(f'{pair} ("," space {pair})*'), False))
        return self._rule(f'"{{" space {self._members(pairs)} "}}"')

    def _members(self, pairs: Sequence[tuple[str, bool]]) -> str:
        first = next((i for i, (_, is_required) in enumerate(pairs) if is_required), None)
        if first is not None:
            before = [f'({pair} "," space)?' for pair, _ in pairs[:first]]
            behind = [f'"," space {pair}' if wanted else f'("," space {pair})?' for pair, wanted in pairs[first + 1 :]]
            return " ".join((*before, pairs[first][0], *behind))
        beginnings, rest = [], ""
        for pair, _ in reversed(pairs):
            beginnings.append(f"{pair} {rest}")
            rest = self._rule(f'("," space {pair})? {rest}')
        return f"({' | '.join(reversed(beginnings))})?" if pairs else ""

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        first, items = schema.get("prefixItems") or [], schema.get("items")
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems")
        low, high = (_count(schema, word, path) for word in ("minItems", "maxItems"))
        low = low or 0
        self._require_order(low, high, path, "Items")
        if high is not None and high < len(first):
            first, items = first[:high], False
        if first and items is None and low <= len(first):
            items = False
        place = f"{path}[]"
        begun = [f"{self.visit(item, place)} space" for item in first]
        entry = None if items is False else f"{self.visit(True if items is None else items, place)} space"
        if entry is None or high == len(begun):
            inner = ' "," space '.join(begun)
        else:
            further = self._rule(f'"," space {entry}')
            n = max(1, len(begun))
            inner = ' "," space '.join(begun or [entry])
            inner += f" {self._times(further, max(0, low - n), None if high is None else high - n, path, 'Items')}"
            inner = f"({inner})?" if not begun and low == 0 else inner
        return self._rule(f'"[" space {inner} "]"')

    def _require_order(self, low: int, high: int | None, path: str, what: str) -> None:
        if high is not None and high < low:
            raise ValueError(f"has fewer than min{what} as max{what} at {path or 'its top'}")

    def _times(self, rule: str, low: int, high: int | None, path: str, what: str) -> str:
        if low > MOST_TIMES:
            low = MOST_TIMES
            self._tell(path, [f"min{what}"])
        if high is not None and high > MOST_TIMES:
            high = None
            self._tell(path, [f"max{what}"])
        return f"{rule}{{{low},{'' if high is None else high}}}"

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        lengths = schema.keys() & {"minLength", "maxLength"}
        pattern, form = schema.get("pattern"), schema.get("format")
        try:
            if pattern is not None:
                inner = pattern_rule(pattern)
                self._tell(path, lengths | schema.keys() & {"format"})
                return self._rule(rf'"\"" {inner} "\""')
        except ValueError:
            self._tell(path, ["pattern"])
        if form in _FORMATS:
            self._tell(path, lengths)
            return self._rule(rf'"\"" {pattern_rule(f"^{_FORMATS[form]}$")} "\""')
        self._tell(path, schema.keys() & {"format"})
        if not lengths:
            return "string"
        low, high = (_count(schema, word, path) for word in ("minLength", "maxLength"))
        low = low or 0
        self._require_order(low, high, path, "Length")
        times = self._times("char", low, high, path, "Length")
        return self._rule(rf'"\"" {times} "\""')

    def _integer(self, schema: Mapping[str, Any], path: str) -> str:
        least = {"minimum": math.ceil, "exclusiveMinimum": lambda bound: math.floor(bound) + 1}
        most = {"maximum": math.floor, "exclusiveMaximum": lambda bound: math.ceil(bound) - 1}
        return self._rule(integers(*_bounds(schema, least, most)))

    def _number(self, schema: Mapping[str, Any], path: str) -> str:
        self._tell(path, [word for word in _BOUNDS & schema.keys() if "exclusive" in word or schema[word] % 1])
        least = dict.fromkeys(("minimum", "exclusiveMinimum"), math.floor)
        most = dict.fromkeys(("maximum", "exclusiveMaximum"), math.ceil)
        return self._rule(decimals(*_bounds(schema, least, most)))


def _listed_by(parts: Sequence[Any]) -> list[Any] | None:
    """The values of schemas that each list theirs; None if one does not."""
    out: list[Any] = []
    for part in parts:
        if not isinstance(part, dict) or not part.keys() & {"const", "enum"}:
            return None
        values = [part["const"]] if "const" in part else part["enum"]
        out += [value for value in values if not any(are_same(value, one) for one in out)]
    return out


def _kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types of the values of a schema; none: any."""
    values = _listed_by([schema])
    if values is not None:
        return set(map(kind_of, values))
    kinds = schema.get("type") or []
    return {"number" if kind == "integer" else kind for kind in (kinds if isinstance(kinds, list) else [kinds])}


def _bounds(schema: Mapping[str, Any], *readers: Mapping[str, Callable[[float], int]]) -> tuple[int | None, int | None]:
    """The least and the greatest number, each of the keywords that may give it."""
    lows, highs = ([read(schema[word]) for word, read in own.items() if word in schema] for own in readers)
    return max(lows, default=None), min(highs, default=None)


def _count(schema: Mapping[str, Any], word: str, path: str) -> int | None:
    """A keyword's number of items or characters."""
    value = schema.get(word)
    if value is None:
        return None
    if value < 0 or value % 1:
        raise ValueError(f"has {json.dumps(value)} as {word} at {path or 'its top'}; give a whole number >= 0")
    return int(value)


def _with_numeric_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, if it is of draft 4 or OpenAPI 3.0: there `exclusiveMinimum` tells whether `minimum` is."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)
    return schema


def _of_type(schema: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Without what is for other types."""
    others = frozenset[str]().union(*_KEYWORDS.values()) - _KEYWORDS.get(kind, frozenset())
    return {word: value for word, value in schema.items() if word not in others}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not part of JSON")


def as_json(value: Any) -> str:
    """A value as JSON: characters as they are, but halves of surrogate pairs, which no text can hold."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


def _literal(text: str) -> str:
    return '"' + "".join(escaped(ord(c)) if c in '"\\' or c < " " else c for c in text) + '"'
