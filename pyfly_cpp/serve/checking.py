"""Checks values against the part of JSON Schema that the descriptions of requests (fields.py) use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pyfly_cpp.serve.errors import bad_request

Schema = dict[str, Any]

_NAMES = {
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "an object",
    "array": "an array",
    "null": "null",
}


def check(schema: Schema, value: Any, path: str = "") -> None:
    """Raises ApiError 400, with the path of what is wrong, unless the value fits the schema."""
    if "anyOf" in schema:
        _check_any(schema["anyOf"], value, path)
        return
    types = schema.get("type")
    if types is not None:
        types = [types] if isinstance(types, str) else types
        kind = next((name for name in types if _is(value, name)), None)
        if kind is None:
            wanted = " or ".join(_NAMES[name] for name in types if name != "null" or len(types) == 1)
            raise bad_request(f"{path or 'the request'} must be {wanted}, not {_shown(value)}.", path or None)
    if value is None:
        return
    if "enum" in schema and value not in schema["enum"]:
        wanted = ", ".join(map(str, schema["enum"]))
        raise bad_request(f"{path} must be one of {wanted}, not {_shown(value)}.", path)
    if isinstance(value, dict):
        _check_object(schema, value, path)
    elif isinstance(value, list):
        _check_size(schema, "Items", len(value), "entries", path)
        if "items" in schema:
            for i, entry in _doubtful(schema["items"], value):
                check(schema["items"], entry, f"{path}[{i}]")
    elif isinstance(value, str):
        _check_size(schema, "Length", len(value), "characters", path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not low <= value <= high:
            wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise bad_request(f"{path} must be {wanted}, not {_shown(value)}.", path)


def _check_any(schemas: list[Schema], value: Any, path: str) -> None:
    fitting = [schema for schema in schemas if _fits_roughly(schema, value)]
    if len(fitting) == 1:
        check(fitting[0], value, path)
        return
    wanted = " or ".join(dict.fromkeys(str(schema.get("title", schema.get("type"))) for schema in schemas))
    raise bad_request(f"{path} must be {wanted}, not {_shown(value)}.", path)


def _fits_roughly(schema: Schema, value: Any) -> bool:
    """Whether this is the schema that is meant: by the type, and that of the first entry."""
    if not _is(value, schema["type"]):
        return False
    if isinstance(value, list) and value and "items" in schema and "type" in schema["items"]:
        return _is(value[0], schema["items"]["type"])
    return not (isinstance(value, list) and not value and schema.get("minItems", 0) > 0)


def _check_object(schema: Schema, value: dict[str, Any], path: str) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            raise bad_request(f"{_inside(path, name)} is missing.", _inside(path, name))
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties")
    _check_size(schema, "Properties", len(value), "entries", path)
    for name, entry in value.items():
        if name in properties:
            check(properties[name], entry, _inside(path, name))
        elif isinstance(others, dict):
            check(others, entry, _inside(path, name))


def _check_size(schema: Schema, what: str, n: int, things: str, path: str) -> None:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if n < low:
        raise bad_request(f"{path} must have at least {low} {things}, not {n}.", path)
    if high is not None and n > high:
        raise bad_request(f"{path} has {n} {things}; at most {high} are allowed.", path)


def _doubtful(schema: Schema, values: list[Any]) -> Iterable[tuple[int, Any]]:
    """(place, entry) of those that need a look: of token ids there may be millions, and few that are none."""
    if schema.get("type") != "integer":
        return enumerate(values)
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return ((i, value) for i, value in enumerate(values) if type(value) is not int or not low <= value <= high)


def _is(value: Any, name: str) -> bool:
    if name == "null":
        return value is None
    if name == "boolean":
        return isinstance(value, bool)
    if name == "integer":
        return not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        )
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"string": str, "object": dict, "array": list}[name])


def _inside(path: str, name: str) -> str:
    return f"{path}.{name[:64]}" if path else name[:64]


def _shown(value: Any) -> str:
    """A value in an error: its kind where it may be long."""
    if isinstance(value, (dict, list, str)) and len(value) > 40:
        return f"{_NAMES['object' if isinstance(value, dict) else 'array' if isinstance(value, list) else 'string']}"
    text = repr(value) if not isinstance(value, str) else repr(value.encode("utf-8", "replace").decode())
    return text if len(text) <= 80 else f"{text[:80]}..."
