"""JSON schemas as grammars whose texts are strict JSON.

llama-cpp-python's converter has three faults here, each of which gives texts that no strict reader takes: its rule for
a character of a string allows control characters; constants and names are not escaped for the grammar; and the
characters of a `pattern` are not escaped for JSON.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import Any

from llama_cpp.llama_grammar import PRIMITIVE_RULES, BuiltinRule, LlamaGrammar, SchemaConverter, json_schema_to_gbnf

from pyfly_cpp.llama.patterns import escaped, pattern_rule

_PAIR = r'[dD] [89abAB] [0-9a-fA-F] [0-9a-fA-F] "\\u" [dD] [c-fC-F] [0-9a-fA-F] [0-9a-fA-F]'
_UNIT = r"[0-9a-ce-fA-CE-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] | [dD] [0-7] [0-9a-fA-F] [0-9a-fA-F]"
CHARACTER = rf'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" ({_UNIT} | {_PAIR}))'
"""The right side of a rule for one character in a JSON string: no control character, no half of a surrogate pair."""

_MOST_KEPT = 256
_strict_of: dict[str, str] = {}
"""Grammars as llama-cpp-python converts them, and ours of the same schemas; the newest last."""

_LOOSE_CHARACTER = re.compile(rf"(?m)^char ::= {re.escape(PRIMITIVE_RULES['char'].content)}$")


class _Converter(SchemaConverter):  # type: ignore[misc]
    def _add_primitive(self, name: str, rule: BuiltinRule) -> str:
        own = BuiltinRule(CHARACTER, []) if rule is PRIMITIVE_RULES["char"] else rule
        return str(super()._add_primitive(name, own))

    def _format_literal(self, text: str) -> str:
        return _literal(as_json(json.loads(text)))  # it is given JSON, always

    def _visit_pattern(self, pattern: str, name: str) -> str:
        return str(self._add_rule(name, rf'"\"" ({pattern_rule(pattern)}) "\"" space'))


def schema_from(text: str) -> Any:
    """A schema in its written form. Raises ValueError: it is no JSON."""
    return json.loads(text, parse_constant=_refuse)


def schema_to_gbnf(schema: Any) -> str:
    """The GBNF grammar of a JSON schema.

    Raises:
        Exception: of many kinds, where it is no schema, or is of a kind that llama-cpp-python cannot follow.
    """
    converter = _Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    converter.visit(converter.resolve_refs(copy.deepcopy(schema), "stdin"), "")  # which writes into it
    return str(converter.format_grammar())


def expect_schema(text: str) -> None:
    """Tells `with_strict_strings` of a schema, as JSON, that a chat format of llama-cpp-python will convert itself.

    Raises:
        Exception: of many kinds, where either cannot convert it: chat formats then let any JSON pass.
    """
    loose, strict = _grammars(text)
    _strict_of.pop(loose, None)
    _strict_of[loose] = strict
    for oldest in list(_strict_of)[:-_MOST_KEPT]:
        _strict_of.pop(oldest, None)


@functools.lru_cache(_MOST_KEPT)
def _grammars(text: str) -> tuple[str, str]:
    """llama-cpp-python's grammar of a schema, and ours."""
    return json_schema_to_gbnf(text), schema_to_gbnf(schema_from(text))


def with_strict_strings(grammar: LlamaGrammar) -> LlamaGrammar:
    """The same grammar, or where llama-cpp-python converted it from a schema, as its chat formats do with a tool's
    parameters, ours of that schema; of one that was not expected, without control characters in strings."""
    loose = grammar._grammar
    strict = _strict_of.get(loose) or _LOOSE_CHARACTER.sub(lambda _: f"char ::= {CHARACTER}", loose)
    return grammar if strict == loose else LlamaGrammar.from_string(strict, verbose=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not part of JSON")


def as_json(value: Any) -> str:
    """A value as JSON: characters as they are, but halves of surrogate pairs, which no text can hold."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


def _literal(text: str) -> str:
    return '"' + "".join(escaped(ord(c)) if c in '"\\' or c < " " else c for c in text) + '"'
