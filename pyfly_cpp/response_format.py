"""`response_format=` of a chat completion: JSON schemas in the forms that clients send, none of them ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import LlamaGrammar

from pyfly_cpp.schemas import schema_from, schema_to_gbnf

_FORMS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}'


def schema_of(response_format: object) -> Any:
    """The JSON schema that an answer must follow: of a `json_schema` format, with the schema inside `json_schema` as
    OpenAI's clients send it, or beside the type; or of a `json_object` format that has one beside the type. None for
    the formats that llama-cpp-python serves itself.

    Raises:
        ValueError: it is none of the formats.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if isinstance(response_format, Mapping) and kind == "json_object":
        return response_format.get("schema")
    if not isinstance(response_format, Mapping) or kind != "json_schema":
        raise ValueError(f"response_format must be {_FORMS}, not {response_format!r}.")
    inner = response_format.get("json_schema", response_format)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if schema is None:
        raise ValueError(f"response_format has the type json_schema and no schema; write {_FORMS}.")
    return schema


def schema_grammar(schema: str, name: str) -> LlamaGrammar:
    """The grammar of a JSON schema in its written form.

    Args:
        name: What it is, for the error.

    Raises:
        ValueError: it is no JSON, or no schema that llama-cpp-python can follow.
    """
    try:
        value = schema_from(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}.") from None
    try:
        return LlamaGrammar.from_string(schema_to_gbnf(value), verbose=False)
    except Exception as error:  # its converter asserts and indexes where a schema is none, or is of a kind it lacks
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"{name} is not a JSON schema that llama-cpp-python can follow ({reason}).") from error


def with_grammar(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `create_chat_completion`, a format with a schema replaced by its grammar; raises ValueError as
    above."""
    out = dict(arguments)
    schema = schema_of(out.get("response_format"))
    if schema is not None:
        if out.get("grammar") is not None:
            raise ValueError("give either grammar= or a response_format with a schema, not both.")
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the schema of response_format is not JSON: {error}.") from None
        out["response_format"], out["grammar"] = None, schema_grammar(text, "the schema of response_format")
    return out
