"""JSON schemas as grammars: whatever follows the grammar is strict JSON, and what the schema asks for."""

from __future__ import annotations

import functools
import ipaddress
import itertools
import json
import os
import random
import re
import uuid

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from pyfly_cpp.grammar.guides import Guide, tokens_of
from pyfly_cpp.grammar.schemas import grammar_of


class Writer:
    """Writes random texts that follow a grammar, and rather those that could go wrong."""

    def __init__(self, path):
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        self._tokens = tokens_of(llama_cpp.llama_model_get_vocab(self._model))
        self._ends = set(self._tokens.ends)
        self._n_words = (self._tokens.texts.vocab_size + 31) // 32
        self._pieces = [self._tokens.texts.decode_bytes([token]) for token in range(self._tokens.texts.vocab_size)]
        nasty = re.compile(rb"[\x00-\x20\\\"\x7fud\x80-\xff]")
        self._nasty = {token for token, piece in enumerate(self._pieces) if nasty.search(piece)}
        self._closing = {token for token, piece in enumerate(self._pieces) if piece in (b'"', b"]", b"}")}

    def close(self):
        llama_cpp.llama_model_free(self._model)

    def write(self, grammar, seed, often=()):
        """A text; None if it became too long to be finished. `often`: characters that it has many of."""
        choose, guide, text = random.Random(seed), Guide(self._tokens, grammar), []
        for n in range(120):
            bits = np.zeros(self._n_words, np.uint32)
            guide.fill(np.array(text, np.int32), bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            assert allowed, (grammar, text)
            wanted = [token for token in allowed if token not in self._ends]
            if len(wanted) < len(allowed) and (not wanted or choose.random() < 0.3):
                return self._tokens.texts.decode_bytes(text).decode()
            closing = [token for token in wanted if token in self._closing]
            nasty = [token for token in wanted if token in self._nasty]
            likely = [token for token in wanted if self._pieces[token] in often]
            if closing and (n > 40 or choose.random() < 0.3):
                wanted = closing
            elif nasty and choose.random() < 0.3:
                wanted = nasty
            elif likely and choose.random() < 0.8:
                wanted = likely
            text.append(choose.choice(wanted))
        return None


@functools.lru_cache(2)  # two are compared
def matcher_of(text):
    return LLMatcher(LLTokenizer("byte"), text)


def passes(grammar, text):
    """Whether a text follows a grammar."""
    matcher, tokens = matcher_of(grammar.text).deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.fixture(scope="module")
def writer(tiny_target):
    writer = Writer(tiny_target)
    yield writer
    writer.close()


def follows(schema, value):
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if "pattern" in schema:
        return re.fullmatch(schema["pattern"][1:-1], value, re.ASCII)
    if schema["type"] == "array":
        return isinstance(value, list) and all(follows(schema["items"], entry) for entry in value)
    if schema["type"] == "object":
        own = schema["properties"]
        return value.keys() == own.keys() and all(follows(own[name], value[name]) for name in own)
    is_length = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**6)
    return isinstance(value, str) and is_length


TEXTS = st.text(st.sampled_from('ab"\\/\n\t\x00\x1f\x7f]-^é😀\u2028'), max_size=4)
CONSTANTS = st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none(), st.lists(TEXTS, max_size=2))
PATTERNS = st.lists(
    st.sampled_from(
        [r"[^@]{1,3}", ".", '["a\\\\]+?', r"\d{2}", r"\.", '"', r"\\", "(?:a|\n)", r"\S", "é", "(b)?"]
    ),
    min_size=1, max_size=4,
).map(lambda parts: f"^{''.join(parts)}$")  # fmt: skip
LEAVES = st.one_of(
    st.just({"type": "string"}),
    st.integers(0, 3).flatmap(
        lambda n: st.integers(n, 6).map(lambda most: {"type": "string", "minLength": n, "maxLength": most})
    ),
    CONSTANTS.map(lambda value: {"const": value}),
    st.lists(CONSTANTS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda own: {"type": "array", "items": own, "maxItems": 2}),
        st.dictionaries(TEXTS.filter(len), inner, min_size=1, max_size=2).map(
            lambda own: {"type": "object", "properties": own, "required": list(own)}
        ),
    ),
    max_leaves=3,
)


@settings(max_examples=150)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_follows_the_grammar_follows_the_schema(writer, schema, seed):
    text = writer.write(grammar_of(schema), seed)
    if text is not None:
        assert follows(schema, json.loads(text)), text


def test_halves_of_surrogate_pairs_are_not_written(writer):
    grammar = grammar_of({"type": "string", "maxLength": 12})
    for seed in range(30):
        text = writer.write(grammar, seed)
        assert text is not None and json.loads(text).encode("utf-8") is not None


@pytest.mark.parametrize(
    "pattern", ["^(?=a)b$", "^(?!a)b$", "^(a$", "^a)$", "^[a$", "^*a$", r"^\1$", "^[b-a]$", "^a{3,2}$"]
)
def test_patterns_that_cannot_be_read_are_named(pattern):
    grammar = grammar_of({"type": "string", "pattern": pattern})
    assert grammar.loose == ("pattern",) and passes(grammar, '"anything"')


@pytest.mark.parametrize(
    "pattern",
    ["^[a-z]{2000}$", "^a{0,2000}$", "^.{1000}$", "^(abcd){1000}$", "^((a)(b)){600,}$", "^(a{0,2}){600}$",
     "^(a{1,40}){1,40}$", "^((a{5}){3}b){900}$"],
)  # fmt: skip
def test_patterns_that_repeat_often(writer, pattern):
    grammar = grammar_of({"type": "string", "pattern": pattern})
    writer.write(grammar, 0)
    assert not grammar.loose and not passes(grammar, '"!"')


@pytest.mark.parametrize(
    "pattern",
    [r"^\d{4}-\d\d$", "^a|bc$", "^[^a]$", r"^[\w.+-]+@[a-z]+\.[a-z]{2,3}$", "^[a-]$", "^[]-]$".replace("]-", r"\]-"),
     r"^\x41\u0042\t?$", "^(?<year>[12]?)x{0,2}$", "^$", "^(|a)$", r"^[\d-]$", r"^[^\D5]+$", r"^\$$",
     r"\d{3}", "^a", "a$", r"^a\$", r"a\\$", "a|b$"],
)  # fmt: skip
def test_patterns_are_followed(writer, pattern):
    grammar = grammar_of({"type": "string", "pattern": pattern})
    letters = "abc78@." if "[" in pattern or r"\d" in pattern else pattern.strip("^$")
    often = {letter.encode() for letter in letters}
    found = (writer.write(grammar, seed, often) for seed in range(60))
    texts = list(itertools.islice(filter(None, found), 4))
    assert texts
    for text in texts:
        assert re.search(pattern.replace("?<", "?P<"), json.loads(text), re.ASCII), text


BOUNDS = st.one_of(st.none(), st.integers(-1200, 1200))


@settings(max_examples=40)
@given(low=BOUNDS, high=BOUNDS, kind=st.sampled_from(["integer", "number"]), seed=st.integers(0, 2**32))
def test_numbers_keep_their_bounds(writer, low, high, kind, seed):
    schema = {"type": kind, "minimum": low, "maximum": high}
    schema = {word: value for word, value in schema.items() if value is not None}
    if low is not None and high is not None and low > high:
        with pytest.raises(ValueError, match="greater than"):
            grammar_of(schema)
        return
    value = json.loads(writer.write(grammar_of(schema), seed))
    assert (low is None or value >= low) and (high is None or value <= high)
    assert isinstance(value, int) or kind == "number"


@pytest.mark.parametrize("low, high", [(0, 9), (7, 13), (18, 120), (-3, 3), (99, 1001), (-120, -18)])
def test_each_integer_between_bounds_can_be_written(low, high):
    grammar = grammar_of({"type": "integer", "minimum": low, "maximum": high})
    found = {n for n in range(-2000, 2000) if passes(grammar, str(n))}
    assert found == set(range(low, high + 1))


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/My_Node"}, {"type": "null"}]}},
        "required": ["next"]}  # fmt: skip


@pytest.mark.parametrize(
    "schema, is_followed",
    [
        ({"$defs": {"My_Node": NODE}, "$ref": "#/$defs/My_Node"}, lambda v: v["next"] is None or "next" in v["next"]),
        ({"type": "object", "properties": {'a"b': {"const": 1}, "*": {"const": 2}}, "required": ["*"]},
         lambda v: v["*"] == 2 and set(v) <= {'a"b', "*"}),
        ({"type": "object", "properties": {"a": {"enum": [1]}, "b": {}, "c": True}}, lambda v: list(v) == sorted(v)),
        ({"type": "object", "additionalProperties": {"type": "integer", "exclusiveMinimum": 0}},
         lambda v: all(n > 0 for n in v.values())),
        ({"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "minItems": 2, "maxItems": 2},
         lambda v: v == [1, None]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, lambda v: len(v) in (2, 3)),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2.0, "maxItems": 2.0}, lambda v: len(v) == 2),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, lambda v: len(v) in (1, 2)),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {"const": 2}}, "required": ["y"]}],
          "$defs": {"a": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}}},
         lambda v: v == {"x": 1, "y": 2}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}], "minimum": 0, "maximum": 99}, lambda v: type(v) is int),
        ({"allOf": [{"type": ["integer", "number", "null"]}, {"type": ["string", "integer"]}]},
         lambda v: type(v) is int),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 1}, lambda v: v in ([], [1])),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 0}, lambda v: v == []),
        ({"type": ["string", "null"], "format": "date"}, lambda v: v is None or re.fullmatch(r"\d{4}-\d\d-\d\d", v)),
        ({"type": "string", "format": "ipv4"}, ipaddress.IPv4Address),
        ({"type": "string", "format": "uuid"}, uuid.UUID),
        ({"type": "string", "format": "date-time"}, lambda v: v[10] in "Tt" and (v[-1] in "Zz" or v[-3] == ":")),
    ],
)  # fmt: skip
def test_schemas_that_people_write(writer, schema, is_followed):
    grammar = grammar_of(schema)
    assert not grammar.loose
    texts = list(filter(None, (writer.write(grammar, seed) for seed in range(12))))
    assert texts and all(is_followed(json.loads(text)) for text in texts), texts


def test_addresses():
    grammar = grammar_of({"type": "string", "format": "email"})
    assert passes(grammar, '"ada@example.org"') and not passes(grammar, '"example.org"')


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    "older, newer",
    [
        ({"minimum": -10, "exclusiveMinimum": False, "maximum": 100}, {"minimum": -10, "maximum": 100}),
        ({"minimum": 0, "exclusiveMinimum": True}, {"exclusiveMinimum": 0}),
        ({"maximum": 100, "exclusiveMaximum": True, "minimum": 3}, {"exclusiveMaximum": 100, "minimum": 3}),
        ({"exclusiveMaximum": True}, {}),
    ],
)
def test_bounds_as_draft_4_and_openapi_write_them(kind, older, newer):
    more = {"minimum": 5, "maximum": 9}
    for wrap in (lambda one: {"type": kind, **one}, lambda one: {"allOf": [{"type": kind, **one}, more]}):
        first, second = (grammar_of(wrap(one)) for one in (older, newer))
        assert all(passes(first, str(n)) == passes(second, str(n)) for n in range(-12, 103))


def test_a_grammar_names_what_it_does_not_enforce():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "multipleOf": 3, "title": "A"},
            "b": {"type": "array", "items": {"type": "string", "pattern": "^(?=x)"}, "uniqueItems": True},
            "c": {"type": "string", "format": "unheard-of", "maxLength": 5000},
            "d": {"not": {"type": "null"}},
        },
    }
    named = {"b[].pattern", "b.uniqueItems", "c.format", "d.not"}
    assert set(grammar_of(schema).loose) == named


@pytest.mark.parametrize(
    "schema, values, loose",
    [
        ({"type": "string", "enum": ["x", 1]}, ["x"], ()),
        ({"type": "integer", "enum": [1.0, 1.5, True, "1"]}, [1], ()),
        ({"type": ["null", "boolean"], "enum": [None, 0, True]}, [None, True], ()),
        ({"enum": [1, 2], "not": {"const": 1}}, [1, 2], ("not",)),
        ({"enum": ["a", "bbb", ""], "maxLength": 1, "minLength": 1}, ["a"], ()),
        ({"enum": [1, 50, "c"], "maximum": 9, "exclusiveMinimum": 0}, [1, "c"], ()),
        ({"enum": [3, 5, 6], "minimum": 3, "exclusiveMinimum": True, "multipleOf": 3}, [6], ()),
        ({"enum": ["ab", "b"], "pattern": "^a.*$"}, ["ab"], ()),
        ({"enum": ["ab", "b"], "pattern": "^(?=a)"}, ["ab", "b"], ("pattern",)),
        ({"enum": ["a", 1], "format": "x", "unheardOf": 5}, ["a", 1], ("format", "unheardOf")),
        ({"const": "a", "enum": ["a", "b"]}, ["a"], ()),
        ({"anyOf": [{"type": "integer"}, {"maxLength": 1}], "enum": ["x", "yy", 1]}, ["x", 1], ()),
        ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}, {"not": {"enum": [3]}}]}, [2, 3], ("not",)),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, [1, 2, 3], ("oneOf",)),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ()),
        ({"$defs": {"A": {"type": "integer"}}, "$ref": "#/$defs/A", "enum": [1, "x"]}, [1], ()),
        ({"enum": [{"a": 1}, {"a": "x"}, {}], "required": ["a"], "properties": {"a": {"type": "string"}}},
         [{"a": "x"}], ()),
        ({"enum": [[1, 4], [1, 2], [3]], "minItems": 2, "items": {"maximum": 2}}, [[1, 2]], ()),
        ({"enum": [1, 2], "not": {"unheardOf": 1}}, [1, 2], ("not",)),
        ({"enum": [1, 2], "title": "T", "default": 1, "description": "d"}, [1, 2], ()),
    ],
)  # fmt: skip
def test_listed_values_keep_to_the_other_keywords(writer, schema, values, loose):
    grammar = grammar_of(schema)
    assert grammar.loose == loose
    found = [json.loads(writer.write(grammar, seed)) for seed in range(24)]
    assert {json.dumps(value) for value in found} == {json.dumps(value) for value in values}


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "n": {"type": "integer"}}}


@pytest.mark.parametrize(
    "parts, loose",
    [
        ([{"type": "string"}, {"type": ["integer", "null"]}], ()),
        ([CAT, DOG], ()),
        ([{"$ref": "#/$defs/cat"}, DOG, {"type": "null"}], ("oneOf",)),
        ([{"type": "integer"}, {"type": "number"}], ("oneOf",)),
        ([DOG, DOG], ("oneOf",)),
        ([{"type": "string"}, {"maxLength": 3}], ("oneOf",)),
        ([{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}], ("oneOf",)),
    ],
)
def test_one_of_schemas_that_a_value_may_follow_together_is_named(parts, loose):
    assert grammar_of({"$defs": {"cat": CAT}, "oneOf": parts}).loose == loose


def test_a_reference_that_recurs_with_something_beside_it(writer):
    following = {"anyOf": [{"$ref": "#/$defs/N", "nullable": True}, {"type": "null"}]}
    node = {"type": "object", "properties": {"next": following}, "required": ["next"]}
    grammar = grammar_of({"$defs": {"N": node}, "$ref": "#/$defs/N", "nullable": True})
    assert set(grammar.loose) == {"nullable", "next.nullable"}
    texts = list(filter(None, (writer.write(grammar, seed) for seed in range(12))))
    assert texts and all(json.loads(text).keys() == {"next"} for text in texts)


@pytest.mark.parametrize(
    "schema", [5, False, {"type": "x"}, {"$ref": "#/$defs/x"}, {"$ref": "http://x"}, {"properties": 5}, {"enum": []},
               {"enum": ["a"], "type": "integer"}, {"enum": 5}, {"enum": [1], "$ref": "#"},
               {"const": 1, "minimum": "x"}, {"type": "integer", "minimum": "x"},
               {"type": "array", "minItems": 3, "maxItems": 1},
               {"type": "array", "prefixItems": [{}, {}], "minItems": 2, "maxItems": 1},
               {"type": "array", "maxItems": 1.5}, {"type": "string", "minLength": -1},
               {"$ref": "#"}, {"$ref": "#", "nullable": True}, {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
               {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}],
)  # fmt: skip
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(ValueError):
        grammar_of(schema)


def test_a_reference_to_an_anchor_is_refused():
    """It was taken for a reference to the whole schema."""
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#x"}},
        "$defs": {"X": {"$anchor": "x", "type": "integer"}},
    }
    with pytest.raises(ValueError, match="anchor 'x'"):
        grammar_of(schema)
