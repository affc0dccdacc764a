"""The fields of requests, as JSON Schema: what is checked, and what the description at /openapi.json says.

Fields that are not here are ignored, as by other servers of the protocol; null is as good as nothing.
"""

from __future__ import annotations

from typing import Any

from pyfly_cpp.serve.checking import Schema

_INT64 = 2**63 - 1
_MOST_STOPS, _MOST_CHARS_OF_STOP = 16, 256
_MOST_ENTRIES = 2**16
"""Of lists whose entries are looked at one by one."""
_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$", "minLength": 1, "maxLength": 64}


def _or_null(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def _optional(**fields: Schema) -> dict[str, Schema]:
    return {name: _or_null(schema) for name, schema in fields.items()}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: Schema, low: int = 0, high: int | None = _MOST_ENTRIES) -> Schema:
    return {"type": "array", "items": items, "minItems": low, **({} if high is None else {"maxItems": high})}


_OBJECT: Schema = {"type": "object"}
_BOOLEAN: Schema = {"type": "boolean"}
_STOP: Schema = {"type": "string", "maxLength": _MOST_CHARS_OF_STOP}
_TOKENS = {**_list(_integer(0), 1, None), "title": "a list of token ids"}


def _texts(text: Schema) -> Schema:
    """One text or several, as such or as token ids."""
    return {
        "anyOf": [
            {**text, "title": "a text"},
            {**_list(text, 1), "title": "a list of texts"},
            _TOKENS,
            {**_list(_TOKENS, 1), "title": "a list of lists of token ids"},
        ]
    }


_SHARED = _optional(
    model=_TEXT,
    max_tokens=_integer(0),
    temperature=_number(0, 2),
    top_p=_number(0, 1),
    top_k=_integer(-1),
    min_p=_number(0, 1),
    typical_p=_number(0, 1),
    repeat_penalty=_number(0.01, 10),
    presence_penalty=_number(-2, 2),
    frequency_penalty=_number(-2, 2),
    mirostat_mode=_integer(0, 2),
    mirostat_tau=_number(0, 100),
    mirostat_eta=_number(0, 1),
    seed=_integer(-_INT64 - 1, _INT64),
    n=_integer(1),
    stream=_BOOLEAN,
    stream_options={"type": "object", "properties": _optional(include_usage=_BOOLEAN)},
    stop={"anyOf": [_STOP, _list(_STOP, 0, _MOST_STOPS)]},
    logit_bias={"type": "object", "additionalProperties": _number(-100, 100), "maxProperties": 1024},
    grammar=_TEXT,
    user=_TEXT,
    gate={"type": "string", "maxLength": 256},
    window={"type": "string", "maxLength": 64},
    draft_max=_integer(0),
    speculative=_BOOLEAN,
    records=_BOOLEAN,
)

_FORMAT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        **_optional(
            schema=_OBJECT,
            json_schema={"type": "object", "required": ["schema"], "properties": {"schema": _OBJECT}},
        ),
    },
}

_CONTENT: Schema = {
    "anyOf": [
        _TEXT,
        _list({"type": "object", "required": ["type"], "properties": {"type": _TEXT, **_optional(text=_TEXT)}}),
        {"type": "null"},
    ]
}
_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _TEXT, "arguments": _TEXT},
        },
        **_optional(id=_TEXT, type=_TEXT),
    },
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": _CONTENT,
        **_optional(name=_TEXT, tool_call_id=_TEXT, tool_calls=_list(_CALL, 0, 128)),
    },
}
_FUNCTION: dict[str, Any] = {
    "required": ["name"],
    "properties": {"name": _NAME, **_optional(description=_TEXT, parameters=_OBJECT, strict=_BOOLEAN)},
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": {"type": "object", **_FUNCTION}},
}
_CHOICE_WORD: Schema = {"type": "string", "enum": ["none", "auto", "required"]}

COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": _texts(_TEXT),
        **_SHARED,
        **_optional(suffix=_TEXT, echo=_BOOLEAN, logprobs=_integer(0, 20), best_of=_integer(1)),
        **_optional(response_format=_FORMAT),
    },
}
"""Of /v1/completions."""

CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": _list(_MESSAGE, 1),
        **_SHARED,
        **_optional(
            max_completion_tokens=_integer(0),
            logprobs=_BOOLEAN,
            top_logprobs=_integer(0, 20),
            response_format=_FORMAT,
            tools=_list(_TOOL, 0, 128),
            tool_choice={
                "anyOf": [
                    _CHOICE_WORD,
                    {
                        "type": "object",
                        "required": ["function"],
                        "properties": {
                            "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}}
                        },
                    },
                ]
            },
            parallel_tool_calls=_BOOLEAN,
        ),
    },
}
"""Of /v1/chat/completions."""

_RESPONSE_ITEM: Schema = {
    "type": "object",
    "properties": {
        **_optional(
            type=_TEXT, role=_MESSAGE["properties"]["role"], content=_CONTENT, name=_TEXT, arguments=_TEXT,
            call_id=_TEXT,
        ),
        "output": _CONTENT,
    },
}  # fmt: skip
RESPONSE: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "input": {"anyOf": [{**_TEXT, "title": "a text"}, {**_list(_RESPONSE_ITEM, 1), "title": "a list of items"}]},
        **{name: schema for name, schema in _SHARED.items() if name not in ("n", "max_tokens", "stream_options")},
        **_optional(
            instructions=_TEXT,
            max_output_tokens=_integer(1),
            previous_response_id=_TEXT,
            text={
                "type": "object",
                "properties": _optional(
                    format={
                        **_FORMAT,
                        "properties": {**_FORMAT["properties"], **_optional(name=_TEXT)},
                    }
                ),
            },
            tools=_list(
                {
                    "type": "object",
                    "required": ["type", "name"],
                    "properties": {"type": {"type": "string", "enum": ["function"]}, **_FUNCTION["properties"]},
                },
                0,
                128,
            ),
            tool_choice={
                "anyOf": [_CHOICE_WORD, {"type": "object", "required": ["name"], "properties": {"name": _TEXT}}]
            },
            parallel_tool_calls=_BOOLEAN,
        ),
    },
}
"""Of /v1/responses."""

_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
EMBEDDING: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "input": _texts(_SOME_TEXT),
        **_optional(
            model=_TEXT,
            user=_TEXT,
            encoding_format={"type": "string", "enum": ["float", "base64"]},
            dimensions=_integer(1),
        ),
    },
}
"""Of /v1/embeddings."""

TOKENIZE: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {"prompt": _TEXT, **_optional(add_special_tokens=_BOOLEAN)},
}
"""Of /tokenize."""

DETOKENIZE: Schema = {"type": "object", "required": ["tokens"], "properties": {"tokens": _list(_integer(0), 0, None)}}
"""Of /detokenize."""
