"""JSON schemas of a chat completion, of `response_format=` and of tools, in the forms that clients send."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from llama_cpp.llama_grammar import LlamaGrammar

from pyfly_cpp.llama.schemas import expect_schema, gbnf_of, schema_from

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
        given = response_format.get("schema")
        return {"type": "object", **given} if isinstance(given, Mapping) and not given.keys() & _TYPED else given
    if not isinstance(response_format, Mapping) or kind != "json_schema":
        raise ValueError(f"response_format must be {_FORMS}, not {response_format!r}.")
    inner = response_format.get("json_schema") or response_format
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if schema is None:
        raise ValueError(f"response_format has the type json_schema and no schema; write {_FORMS}.")
    return schema


def schema_grammar(schema: str, name: str) -> LlamaGrammar:
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
    with _convertible(name):
        made = gbnf_of(value)
        grammar = LlamaGrammar.from_string(made.text, verbose=False)
    if made.loose:
        warnings.warn(f"{name}: a grammar cannot enforce {', '.join(made.loose)}; check the answer.", stacklevel=4)
    return grammar


def with_grammar(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `create_chat_completion`, a format with a schema replaced by its grammar; the schemas of tools are
    made known to `with_strict_strings`. Raises ValueError as above, for a tool only if the call must be of it."""
    out = dict(arguments)
    schema = schema_of(out.get("response_format"))
    if schema is not None:
        if out.get("grammar") is not None:
            raise ValueError("give either grammar= or a response_format with a schema, not both.")
        text = _as_text(schema, "the schema of response_format")
        out["response_format"], out["grammar"] = None, schema_grammar(text, "the schema of response_format")
    named = named_tool(out)
    for name, parameters in _parameters_of_tools(out):
        what = f"the schema of the tool {name!r}"
        with contextlib.suppress(*([] if name == named else [ValueError])):
            text = _as_text(parameters, what)
            with _convertible(what):
                expect_schema(text)
    return out


@contextlib.contextmanager
def _convertible(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name} {error}.") from error
    except Exception as error:  # llama-cpp-python's converter asserts and indexes where a schema is of a kind it lacks
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(f"{name} is not a JSON schema that llama-cpp-python can follow ({reason}).") from error


def _as_text(schema: object, name: str) -> str:
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


def _parameters_of_tools(arguments: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(name, schema) of each tool that has one; what is no tool is left to the chat format."""
    tools = [tool.get("function") for tool in arguments.get("tools") or () if isinstance(tool, Mapping)]
    for function in [*tools, *(arguments.get("functions") or ())]:
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), Mapping):
            yield function.get("name"), function["parameters"]
