"""Our grammars in place of those that llama-cpp-python and its chat formats convert from schemas themselves."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llama_cpp import llama_grammar
from llama_cpp.llama_grammar import JSON_GBNF, PRIMITIVE_RULES, LlamaGrammar, json_schema_to_gbnf

from pyfly_cpp.grammar.response_format import as_text, convertible, named_tool, of_objects, schema_grammar, schema_of
from pyfly_cpp.grammar.schemas import SchemaGrammar, grammar_of, schema_from

_MOST_KEPT = 256
_strict_of: dict[str, SchemaGrammar] = {}
"""Schemas as chat formats write them, and our grammars of them; the newest last."""


_asks_a_format: contextvars.ContextVar[bool] = contextvars.ContextVar("asks_a_format", default=False)


@contextlib.contextmanager
def asking_a_format() -> Iterator[None]:
    """A block in which a chat format of llama-cpp-python works: the schemas that it converts there become the grammars
    that `with_grammar` has made of them. A user's own conversions are left alone."""
    token = _asks_a_format.set(True)
    try:
        yield
    finally:
        _asks_a_format.reset(token)


class _Converted(str):
    """A grammar that llama-cpp-python has made of a schema, for a chat format. Others may become the same one, as it
    leaves out bounds."""

    schema = ""


def _convert(schema: str, *more: Any, **named: Any) -> str:
    if not _asks_a_format.get():
        text: str = json_schema_to_gbnf(schema, *more, **named)
        return text
    try:
        grammar = _Converted(json_schema_to_gbnf(schema, *more, **named))
    except Exception:
        if schema not in _strict_of:
            raise
        grammar = _Converted(JSON_GBNF)  # ours takes its place
    grammar.schema = schema
    return grammar


llama_grammar.json_schema_to_gbnf = _convert  # chat formats convert tools' parameters themselves

_PAIR = r'[dD] [89abAB] [0-9a-fA-F] [0-9a-fA-F] "\\u" [dD] [c-fC-F] [0-9a-fA-F] [0-9a-fA-F]'
_UNIT = r"[0-9a-ce-fA-CE-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] | [dD] [0-7] [0-9a-fA-F] [0-9a-fA-F]"
_CHARACTER = rf'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" ({_UNIT} | {_PAIR}))'
"""One character in a JSON string: no control character, no half of a surrogate pair."""
_LOOSE_CHARACTER = re.compile(rf"(?m)^char ::= {re.escape(PRIMITIVE_RULES['char'].content)}$")


def with_grammar(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `create_chat_completion`, a format with a schema replaced by its grammar; the schemas of tools are
    made known to `with_strict_strings`. Raises ValueError as `schema_grammar` does, for a tool only if the
    call must be of it."""
    out = dict(arguments)
    for name in ("tools", "functions"):  # they are read twice
        if isinstance(out.get(name), Iterator):
            out[name] = list(out[name])
    schema = schema_of(out.get("response_format"))
    if schema is not None:
        if out.get("grammar") is not None:
            raise ValueError("give either grammar= or a response_format with a schema, not both.")
        text = as_text(schema, "the schema of response_format")
        out["response_format"], out["grammar"] = None, schema_grammar(text, "the schema of response_format")
    named = named_tool(out)
    for name, parameters in _parameters_of_tools(out):
        what = f"the schema of the tool {name!r}"
        with contextlib.suppress(*([] if name == named else [ValueError])):
            text = as_text(parameters, what)
            with convertible(what):
                _expect_schema(text)
    return out


def _parameters_of_tools(arguments: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(name, schema) of each tool that has one; what is no tool is left to the chat format."""
    tools = [tool.get("function") for tool in arguments.get("tools") or () if isinstance(tool, Mapping)]
    for function in [*tools, *(arguments.get("functions") or ())]:
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), Mapping):
            yield function.get("name"), function["parameters"]


def _expect_schema(text: str) -> None:
    """Tells `with_strict_strings` of a schema, as JSON, that a chat format of llama-cpp-python will convert itself.
    Raises exceptions of many kinds if it cannot be followed: chat formats then let any JSON pass."""
    strict = _strict_grammar(text)
    _strict_of.pop(text, None)
    _strict_of[text] = strict
    for oldest in list(_strict_of)[:-_MOST_KEPT]:
        _strict_of.pop(oldest, None)


@functools.lru_cache(_MOST_KEPT)
def _strict_grammar(text: str) -> SchemaGrammar:
    return grammar_of(of_objects(schema_from(text)))


def with_strict_strings(grammar: LlamaGrammar | SchemaGrammar) -> LlamaGrammar | SchemaGrammar:
    """The same grammar, or if llama-cpp-python converted it from a schema, as its chat formats do with a tool's
    parameters, ours of that schema; of one that was not expected, without control characters in strings."""
    if isinstance(grammar, SchemaGrammar):
        return grammar
    loose = grammar._grammar
    if isinstance(loose, _Converted) and loose.schema in _strict_of:
        return _strict_of[loose.schema]
    strict = _LOOSE_CHARACTER.sub(lambda _: f"char ::= {_CHARACTER}", loose)
    return grammar if strict == loose else LlamaGrammar.from_string(strict, verbose=False)
