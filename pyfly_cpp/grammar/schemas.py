"""JSON schemas as grammars of llguidance, read as clients mean them, and with what is not enforced by name.

llguidance follows the letter of JSON Schema, by which an object may have any properties besides those it describes, and
`{"pattern": ...}` allows every value that is no string. Models and clients go by what is written: an object has the
properties that are listed, and a keyword of texts means a text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from llguidance import LLMatcher

_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""The keywords of a type that llguidance enforces."""
_TYPED = ("type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf")
"""Keywords of all types that it enforces; a schema with one of them tells its type."""
_ANNOTATIONS = ("$schema", "$id", "$defs", "$comment", "$anchor", "definitions", "title", "description", "default",
                "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator")  # fmt: skip
"""The keywords that no value breaks."""
_ENFORCED = frozenset((*_TYPED, *(word for words in _KEYWORDS.values() for word in words)))
_KNOWN = _ENFORCED.union(_ANNOTATIONS)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OPEN = ("additionalProperties", "patternProperties")
"""Keywords that tell of properties besides those that are listed."""
_OPTIONS = {"lenient": True, "whitespace_pattern": " "}
"""Of llguidance: keywords that it does not know are left out; a space or none between the parts of a value."""

_CIRCLE = "refers to itself at {}, with no value in between"
_LARGEST = 2**53 - 1
"""The integers up to here are read as they were written by all readers of JSON."""
_MOST_NESTED = 100
_MOST_READ = 20_000
"""Schemas within a schema, those that are read again where a reference stands beside other keywords included."""


class SchemaGrammar(NamedTuple):
    """The grammar of a schema, or one that was written for llama.cpp (gbnf.py), for a sampler."""

    text: str
    """Lark, as llguidance reads it."""
    loose: tuple[str, ...] = ()
    """Rules that the grammar does not enforce: keywords behind the names of the properties that they stand at."""
    is_by_character: bool = False
    """Whether its words are single characters: a step takes more."""


class Framed(NamedTuple):
    """A schema, and what stands around the value that follows it."""

    schema: Any
    opening: str = ""
    closing: str = ""
    name: str = ""
    """For people."""
    call: tuple[str, str] | None = None
    """Of the arguments of a function: its name, and the key of the arguments. The value is the whole call."""


def schema_from(text: str) -> Any:
    """A schema in its written form. Raises ValueError: it is no JSON."""
    return json.loads(text, parse_constant=_refuse)


def grammar_of(schema: Any) -> SchemaGrammar:
    """The grammar of a JSON schema. Properties come in the order of the schema.

    Raises:
        ValueError: it is none, refers to what is not there, or nothing follows it. The message stands behind a name
            for the schema.
    """
    return grammar_of_any([Framed(schema)])


def grammar_of_any(framed: Sequence[Framed], is_repeated: bool = False) -> SchemaGrammar:
    """The grammar of texts that follow one of some schemas; as of `grammar_of`.

    Args:
        is_repeated: Whether there may be several in a line each.
    """
    ones, rules, loose = list[str](), list[str](), list[str]()
    for i, own in enumerate(framed):
        try:
            schema, missed = _read(own)
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            reason = {ValueError: str(error), RecursionError: "is nested too deep"}.get(
                type(error), "is not a JSON schema: a keyword has a value of the wrong type"
            )
            raise ValueError(f"has {own.name!r}, whose schema {reason}" if own.name else reason) from None
        loose += [f"{own.name}: {word}" if own.name else word for word in missed]
        ones.append(" ".join((*_literal(own.opening), f"s{i}", *_literal(own.closing))))
        rules.append(f"s{i}: %json {json.dumps(schema)}")
    start = 'one ("\\n" one)*' if is_repeated else "one"
    text = "\n".join((f"start: {start}", f"one: {' | '.join(ones)}", *rules))
    return SchemaGrammar(text, tuple(dict.fromkeys(loose)))


def _read(framed: Framed) -> tuple[dict[str, Any], list[str]]:
    """The schema of a value as llguidance takes it, and the keywords that it does not enforce. Raises ValueError: it
    does not take it."""
    name, key = framed.call or ("", "")
    reader = _SchemaReader(framed.schema, f"/properties/{key}" if key else "")
    schema = reader.read()
    if key:
        schema = {"type": "object", "properties": {"name": {"const": name}, key: schema},
                  "required": ["name", key], "additionalProperties": False}  # fmt: skip
    schema["x-guidance"] = _OPTIONS
    is_error, messages = _validate(schema)
    if is_error:
        raise ValueError(f"cannot be followed ({messages[0].splitlines()[0][:200].rstrip('.')})")
    return schema, reader.loose(messages)


def _validate(schema: Any) -> tuple[bool, list[str]]:
    """Whether llguidance refuses a schema, and why; or its warnings."""
    return LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


class _SchemaReader:
    """A schema as it is meant, in the words that llguidance enforces."""

    def __init__(self, root: Any, place: str) -> None:
        """`place`: where the schema will stand in another one, as references tell it."""
        self._root = root
        self._place = place
        self._told: list[tuple[str, str, Any]] = []  # (path, keyword, value), each where it stands
        self._names: dict[str, str] = {}  # of references
        self._parts: dict[str, Any] = {}  # what they lead to, by name
        self._open: list[tuple[str, str]] = []  # references that are being read, each with its path
        self._n_nested = self._n_read = 0

    def read(self) -> dict[str, Any]:
        """The schema. Raises ValueError: it is none."""
        if self._root is not True and not isinstance(self._root, dict):
            raise ValueError(f"is not a JSON schema: {json.dumps(self._root)[:40]} is not an object")
        out: dict[str, Any] = {} if self._root is True else self._visit(self._root, "")
        return {**out, "$defs": self._parts} if self._parts else out

    def loose(self, warnings: Sequence[str]) -> list[str]:
        """The keywords that are not enforced, behind their paths, by what was read and llguidance's warnings."""
        formats = {text.split(": ", 1)[1] for text in warnings if text.startswith("Unknown format: ")}
        is_coerced = any(text.startswith("oneOf ") for text in warnings)
        return [
            f"{path}.{word}".lstrip(".")
            for path, word, value in self._told
            if word not in _KNOWN
            or (word == "format" and value in formats)
            or (word == "oneOf" and is_coerced)
            or (word == "pattern" and not _is_readable(value))
        ]

    def _visit(self, schema: Any, path: str, is_part: bool = False) -> Any:
        """A schema as it is meant. `is_part`: another one is about the same value, and lists all its properties."""
        if not isinstance(schema, dict):
            return schema
        self._n_nested += 1
        self._n_read += 1
        if self._n_nested > _MOST_NESTED or self._n_read > _MOST_READ:
            raise ValueError("is nested too deep" if self._n_nested > _MOST_NESTED else "has too many parts")
        out = self._read(schema, path, is_part)
        self._n_nested -= 1
        return out

    def _read(self, schema: dict[str, Any], path: str, is_part: bool) -> dict[str, Any]:
        self._told += [(path, word, value) for word, value in schema.items() if word not in _ANNOTATIONS]
        others = self._about_the_same(schema)
        is_joined = is_part or ("properties" in schema) + len(others) > 1
        out: dict[str, Any] = {}
        for word, value in schema.items():
            if word in ("properties", "patternProperties"):
                dot = "." if word == "properties" else "*"
                out[word] = {name: self._visit(one, f"{path}{dot}{name}".lstrip(".")) for name, one in value.items()}
            elif word in ("allOf", "anyOf", "oneOf"):
                parts = [self._visit(one, path, is_joined) for one in value]
                is_one = word == "oneOf" and "discriminator" in schema and "anyOf" not in schema
                out["anyOf" if is_one else word] = out.get(word, []) + parts
            elif word == "additionalProperties":
                out[word] = self._visit(value, path)
            elif word in ("prefixItems", "items") and isinstance(value, list):
                out["prefixItems"] = [self._visit(one, f"{path}[]") for one in value]
            elif word == "items" or (word == "additionalItems" and isinstance(schema.get("items"), list)):
                out["items"] = self._visit(value, f"{path}[]")
            elif word == "$ref" and not (is_joined and self._about_the_same({word: value})):
                out[word] = self._reference(value, path)
            elif word == "$ref":
                out["allOf"] = [*out.get("allOf", []), self._within(value, path, is_part=True)]
            elif word in _COUNTS and isinstance(value, float) and value.is_integer():
                out[word] = int(value)
            elif word in _ENFORCED and (word != "pattern" or _is_readable(value)):
                out[word] = value
        if not is_part:
            self._complete(out, [schema, *(one for group in others for one in group)] if is_joined else [schema])
        return out

    def _complete(self, out: dict[str, Any], about: Sequence[dict[str, Any]]) -> None:
        """Adds what a schema does not say: its type, that an object has no properties but those that it, or others
        about the same value, list, and that an integer ends, which small models might never do."""
        if not out.keys() & set(_TYPED):
            kind = next((kind for kind, words in _KEYWORDS.items() if out.keys() & set(words)), None)
            out.update({} if kind is None else {"type": kind})
        kinds = out.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "integer" in kinds and "number" not in kinds:
            for bound, value in (("minimum", -_LARGEST), ("maximum", _LARGEST)):
                if bound not in out and f"exclusive{bound.capitalize()}" not in out:
                    out[bound] = value
        lists = [one["properties"] for one in about if "properties" in one]
        if lists and not any(one.keys() & set(_OPEN) for one in about):
            out["properties"] = {**{name: True for names in lists for name in names}, **out.get("properties", {})}
            out["additionalProperties"] = False

    def _about_the_same(self, schema: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """The schemas of objects that a schema refers to, or has as parts, in groups that a value follows together: of
        `anyOf` and `oneOf` it follows one."""
        members = [[one] for one in schema.get("allOf", ())]
        members += [schema[word] for word in ("anyOf", "oneOf") if word in schema]
        if "$ref" in schema:
            members.append([self._target(schema["$ref"])])
        return [found for group in members if (found := self._objects(group))]

    def _objects(self, schemas: Sequence[Any]) -> list[dict[str, Any]]:
        """Schemas, and what they lead to without a value in between, as far as they are about properties."""
        out, left, seen = list[dict[str, Any]](), list(schemas), set[str]()
        while left:
            one = left.pop(0)
            if not isinstance(one, dict):
                continue
            if one.keys() & {"properties", *_OPEN}:
                out.append(one)
            for word in ("allOf", "anyOf", "oneOf"):
                left += one.get(word, ())
            if "$ref" in one and one["$ref"] not in seen:
                seen.add(one["$ref"])
                left.append(self._target(one["$ref"]))
        return out

    # ---- References --------------------------------------------------------------------------------------------------

    def _reference(self, reference: str, path: str) -> str:
        """A reference to a part that was read."""
        if reference not in self._names:
            name = self._names[reference] = f"d{len(self._names)}"
            self._parts[name] = self._within(reference, path, is_part=False)
        elif (reference, path) in self._open:
            raise ValueError(_CIRCLE.format(path or "its top"))
        return f"#{self._place}/$defs/{self._names[reference]}"

    def _within(self, reference: str, path: str, is_part: bool) -> Any:
        """The target of a reference, as of `_visit`."""
        if (reference, path) in self._open:
            raise ValueError(_CIRCLE.format(path or "its top"))
        self._open.append((reference, path))
        out = self._visit(self._target(reference), path, is_part)
        self._open.pop()
        return out

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(f"refers to {str(reference)[:80]!r}, which is outside of it; put it into $defs")
        target, (name, *keys) = self._root, unquote(reference[1:]).split("/")
        if name:
            raise ValueError(f"refers to the anchor {name[:80]!r}; refer to a place, such as #/$defs/NAME")
        for key in keys:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise ValueError(f"refers to {reference[:80]!r}, which it does not have")
        return target


@functools.lru_cache(256)
def _is_readable(pattern: Any) -> bool:
    """Whether llguidance takes a pattern. It has no lookaround and no references to groups."""
    return not isinstance(pattern, str) or not _validate({"type": "string", "pattern": pattern})[0]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not part of JSON")


def as_json(value: Any) -> str:
    """A value as JSON: characters as they are, but halves of surrogate pairs, which no text can hold."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


def _literal(text: str) -> list[str]:
    """A text as a part of a rule; none for an empty one."""
    return [json.dumps(text, ensure_ascii=False)] if text else []
