"""JSON schemas of a chat completion, of `response_format=` and of tools, in the forms that clients send."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from pyfly_cpp.grammar.schemas import SchemaGrammar, grammar_of, schema_from

_TYPED = frozenset(("type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf"))
"""Keywords of a schema that tell the type of a value."""
_FORMS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'


def schema_of(response_format: object) -> Any:
    """The JSON schema that an answer must follow: of a `json_schema` format, with the schema inside `json_schema` as
    OpenAI's clients send it, or next to the type; or of a `json_object` format that has one next to the type, which is
    one of objects if it names no type. None for the formats that llama-cpp-python serves itself.

    Raises:
        ValueError: it is none of the formats.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if isinstance(response_format, Mapping) and kind == "json_object":
        return of_objects(response_format.get("schema"))
    if not isinstance(response_format, Mapping) or kind != "json_schema":
        raise ValueError(f"response_format must be {_FORMS}, not {response_format!r}.")
    inner = response_format.get("json_schema") or response_format
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if schema is None:
        raise ValueError(f"response_format has the type json_schema and no schema; write {_FORMS}.")
    return schema


def of_objects(schema: Any) -> Any:
    """A schema that names no type as one of objects: a tool's arguments, and what `json_object` promises."""
    return {"type": "object", **schema} if isinstance(schema, Mapping) and not schema.keys() & _TYPED else schema


def schema_grammar(schema: str, name: str) -> SchemaGrammar:
    """The grammar of a JSON schema in its written form. Warns of keywords that it does not enforce.

    Args:
        name: What it is, for the error.

    Raises:
        ValueError: it is no JSON, or no schema that can be followed.
    """
    try:
        value = schema_from(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}.") from None
    with convertible(name):
        grammar = grammar_of(value)
    if grammar.loose:
        warnings.warn(f"{name}: a grammar cannot enforce {', '.join(grammar.loose)}; check the answer.", stacklevel=4)
    return grammar


@contextlib.contextmanager
def convertible(name: str) -> Iterator[None]:
    """A block that converts a schema: what goes wrong in it is a ValueError that begins with the schema's name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name} {error}.") from error
    except Exception as error:  # llama-cpp-python's converter asserts and indexes where a schema is of a kind it lacks
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"{name} is not a JSON schema that llama-cpp-python can follow ({reason}).") from error


def as_text(schema: object, name: str) -> str:
    """A schema as JSON; raises ValueError, which begins with its name, if it cannot be written."""
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}.") from None


def named_tool(arguments: Mapping[str, Any]) -> Any:
    """The name of the tool that the answer must call; None if it may call any or none."""
    choice, function = arguments.get("tool_choice"), arguments.get("function_call")
    if isinstance(function, Mapping):  # the older form, which comes first in llama-cpp-python, too
        return function.get("name")
    inner = choice.get("function") if isinstance(choice, Mapping) else None
    return inner.get("name") if isinstance(inner, Mapping) else None
