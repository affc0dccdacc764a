"""Whether a value follows a JSON schema, as far as that is known: for the values that `enum` and `const` list."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from pyfly_cpp.grammar.patterns import pattern_rule

ANNOTATIONS = frozenset((
    "$schema", "$id", "$defs", "$comment", "$anchor", "definitions", "title", "description", "default", "examples",
    "example", "deprecated", "readOnly", "writeOnly", "discriminator",
))  # fmt: skip
"""The keywords that no value breaks."""

_MOST_NESTED = 100
_KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip

Target = Callable[[Any], Any]
"""Finds the schema that a reference leads to."""


def follows(value: Any, schema: Any, target: Target, n_nested: int = 0) -> bool | None:
    """Whether it does; None: that is not known.

    Args:
        target: Raises ValueError if there is none.

    Raises:
        ValueError: it is no schema, or nested too deep.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise ValueError("is not a JSON schema: a keyword has a value of the wrong type")
    if n_nested > _MOST_NESTED:
        raise ValueError("is nested too deep")
    return _all(keeps(value, word, schema, target, n_nested) for word in schema)


def keeps(value: Any, word: str, schema: Mapping[str, Any], target: Target, n_nested: int = 0) -> bool | None:
    """Whether a value keeps to one keyword of a schema; the rest is as of `follows`."""

    def inner(value: Any, schema: Any) -> bool | None:
        return follows(value, schema, target, n_nested + 1)

    wanted = schema[word]
    if word in ANNOTATIONS:
        return True
    if word == "type":
        kinds = wanted if isinstance(wanted, list) else [wanted]
        return any(is_of_kind(value, kind) for kind in kinds)
    if word in ("enum", "const"):
        return any(are_same(value, one) for one in (wanted if word == "enum" else [wanted]))
    if word == "$ref":
        return inner(value, target(wanted))
    if word == "allOf":
        return _all(inner(value, part) for part in wanted)
    if word == "anyOf":
        return _not(_all(_not(inner(value, part)) for part in wanted))
    if word == "oneOf":
        found = [inner(value, part) for part in wanted]
        return False if found.count(True) > 1 else None if None in found else found.count(True) == 1
    if word == "not":
        return _not(inner(value, wanted))
    for kind, words in _WORDS.items():
        if word in words:
            return words[word](value, wanted, schema, inner) if is_of_kind(value, kind) else True
    return None


def is_of_kind(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON schema."""
    if kind == "integer":
        return is_of_kind(value, "number") and value % 1 == 0
    return isinstance(value, _KINDS.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def kind_of(value: Any) -> str:
    """The type of a value; `number` of an integer."""
    return next(kind for kind in _KINDS if is_of_kind(value, kind))


def are_same(first: Any, second: Any) -> bool:
    """Whether two values are equal in JSON: 1 is 1.0, and no truth value."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(are_same(value, second[name]) for name, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(are_same, first, second))
    return bool(kind_of(first) == kind_of(second) and first == second)


def _all(known: Iterable[bool | None]) -> bool | None:
    found = set(known)
    return False if False in found else None if None in found else True


def _not(known: bool | None) -> bool | None:
    return None if known is None else not known


def _matches(value: str, pattern: str, *_: Any) -> bool | None:
    try:
        pattern_rule(pattern)  # understands what means the same in Python
    except ValueError:
        return None
    return re.search(pattern, value, re.ASCII) is not None


def _is_multiple(value: float, of: float, *_: Any) -> bool:
    return math.isfinite(of) and of > 0 and Fraction(str(value)) % Fraction(str(of)) == 0


def _are_items(value: list[Any], wanted: Any, schema: Mapping[str, Any], inner: Any) -> bool | None:
    """Of `items`; those of `prefixItems` come before them."""
    if isinstance(wanted, list):
        return _all(map(inner, value, wanted))
    return _all(inner(item, wanted) for item in value[len(schema.get("prefixItems") or ()) :])


def _are_additional(value: Any, wanted: Any, schema: Mapping[str, Any], inner: Any) -> bool | None:
    """Of `additionalItems` and `additionalProperties`."""
    if isinstance(value, list):
        first = schema.get("items")
        return _all(inner(item, wanted) for item in (value[len(first) :] if isinstance(first, list) else ()))
    if "patternProperties" in schema:
        return None
    return _all(inner(one, wanted) for name, one in value.items() if name not in (schema.get("properties") or {}))


_WORDS: dict[str, dict[str, Callable[[Any, Any, Mapping[str, Any], Any], bool | None]]] = {
    "number": {
        "minimum": lambda value, least, *_: value >= least,
        "maximum": lambda value, most, *_: value <= most,
        "exclusiveMinimum": lambda value, least, *_: value > least,
        "exclusiveMaximum": lambda value, most, *_: value < most,
        "multipleOf": _is_multiple,
    },
    "string": {
        "minLength": lambda value, least, *_: len(value) >= least,
        "maxLength": lambda value, most, *_: len(value) <= most,
        "pattern": _matches,
        "format": lambda *_: None,
    },
    "array": {
        "minItems": lambda value, least, *_: len(value) >= least,
        "maxItems": lambda value, most, *_: len(value) <= most,
        "uniqueItems": lambda value, wanted, *_: not wanted or not any(
            are_same(one, other) for i, one in enumerate(value) for other in value[:i]
        ),
        "prefixItems": lambda value, wanted, _, inner: _all(map(inner, value, wanted)),
        "items": _are_items,
        "additionalItems": _are_additional,
    },
    "object": {
        "required": lambda value, names, *_: set(names) <= value.keys(),
        "properties": lambda value, wanted, _, inner: _all(
            inner(value[name], one) for name, one in wanted.items() if name in value
        ),
        "additionalProperties": _are_additional,
        "minProperties": lambda value, least, *_: len(value) >= least,
        "maxProperties": lambda value, most, *_: len(value) <= most,
    },
}  # fmt: skip
"""The keywords of each type, and whether a value of it keeps to them."""
