"""JSON schemas as grammars: whatever follows the grammar is strict JSON, and what the schema asks for."""

from __future__ import annotations

import codecs
import ctypes
import ipaddress
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

from pyfly_cpp.grammar.numbers import integers
from pyfly_cpp.grammar.patterns import pattern_rule
from pyfly_cpp.grammar.schemas import gbnf_of


class Writer:
    """Writes random texts that follow a grammar, byte by byte, and rather those that could go wrong."""

    def __init__(self, path):
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        buffer = ctypes.create_string_buffer(64)
        self._bytes = {}
        for token in range(llama_cpp.llama_vocab_n_tokens(self._vocab)):
            if llama_cpp.llama_token_to_piece(self._vocab, token, buffer, 64, 0, False) == 1:
                self._bytes[token] = buffer.raw[0]
        self._end = llama_cpp.llama_vocab_eos(self._vocab)

    def close(self):
        llama_cpp.llama_model_free(self._model)

    def reads(self, grammar):
        """Whether llama.cpp can."""
        sampler = llama_cpp.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        llama_cpp.llama_sampler_free(sampler)
        return bool(sampler)

    def write(self, grammar, seed):
        """A text; None if it became too long to be finished."""
        choose = random.Random(seed)
        sampler = llama_cpp.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        assert sampler, grammar
        out = bytearray()
        try:
            for n in range(400):
                rows = np.zeros(
                    len(self._bytes) + 1, dtype=np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
                )
                rows["id"] = [*self._bytes, self._end]
                data = rows.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
                array = llama_cpp.llama_token_data_array(data=data, size=len(rows), selected=-1, sorted=False)
                llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
                allowed = rows["id"][np.isfinite(rows["logit"])].tolist()
                assert allowed, (grammar, bytes(out))
                if self._end in allowed and (len(allowed) == 1 or choose.random() < 0.3):
                    return out.decode()
                wanted = [t for t in allowed if t != self._end and is_text(bytes([*out, self._bytes[t]]))]
                closing = [t for t in wanted if self._bytes[t] in b'"]}']
                nasty = [t for t in wanted if self._bytes[t] < 0x20 or self._bytes[t] in b'\\"\x7fud']
                if closing and (n > 100 or choose.random() < 0.3):
                    wanted = closing
                elif nasty and choose.random() < 0.3:
                    wanted = nasty
                token = choose.choice(wanted)
                llama_cpp.llama_sampler_accept(sampler, token)
                out.append(self._bytes[token])
            return None
        finally:
            llama_cpp.llama_sampler_free(sampler)


def is_text(beginning):
    """Whether bytes can go on to be UTF-8; llama.cpp's grammars do not ask for it."""
    if b"\xed" in beginning:  # surrogates begin like this, and Python finds out late
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return True


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
CONSTANTS = st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.lists(TEXTS, max_size=2))
PATTERNS = st.lists(
    st.sampled_from(
        [r"[^@]{1,3}", ".", '["a\\\\]+?', r"\d{2}", r"\.", '"', r"\\", "(?:a|\n)", r"[\x00-\x1f]*", r"\S", "é", "(b)?"]
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
    text = writer.write(gbnf_of(schema).text, seed)
    if text is not None:
        assert follows(schema, json.loads(text)), text


def test_halves_of_surrogate_pairs_are_not_written(writer):
    grammar = gbnf_of({"type": "string", "maxLength": 12}).text
    for seed in range(100):
        text = writer.write(grammar, seed)
        assert text is not None and json.loads(text).encode("utf-8") is not None


@pytest.mark.parametrize(
    "pattern",
    ["^(?=a)b$", "^(?!a)b$", "^(a$", "^a)$", "^[a$", "^*a$", "^a**$", r"^\1$", r"^\bx$",
     r"^\p{L}$", "^a^b$", "^[]$", "^[b-a]$", r"^\ud800$", "^" + "(" * 65 + ")" * 65 + "$", "^a{3,2}$", "^a{2001}$",
     "^(?:a{1,50}){1,50}$", "^.{1001}$"],
)  # fmt: skip
def test_patterns_that_are_refused(pattern):
    with pytest.raises(ValueError, match="the pattern "):
        pattern_rule(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["^[a-z]{2000}$", "^a{0,2000}$", "^.{1000}$", "^(abcd){1000}$", "^((a)(b)){600,}$", "^(a{0,2}){600}$",
     "^(a?b*){600}$", "^(a{1,40}){1,40}$", "^((a{5}){3}b){900}$"],
)  # fmt: skip
def test_llama_cpp_reads_patterns_that_repeat_often(writer, pattern):
    grammar = gbnf_of({"type": "string", "pattern": pattern}).text
    assert pattern_rule(pattern) in grammar and writer.reads(grammar)


@pytest.mark.parametrize(
    "pattern",
    [r"^\d{4}-\d\d$", "^a|bc$", "^[^a]$", r"^[\w.+-]+@[a-z]+\.[a-z]{2,3}$", "^[a-]$", "^[]-]$".replace("]-", r"\]-"),
     r"^\x41\u0042\t?$", "^(?<year>[12]?)x{0,2}$", "^$", "^(|a)$", r"^[\d-]$", r"^[^\D5]+$", "^{}$", r"^\$$",
     r"\d{3}", "^a", "a$", r"^a\$", r"a\\$", "a|b$"],
)  # fmt: skip
def test_patterns_are_followed(writer, pattern):
    grammar = gbnf_of({"type": "string", "pattern": pattern}).text
    for seed in range(20):
        text = writer.write(grammar, seed)
        assert text is None or re.search(pattern.replace("?<", "?P<"), json.loads(text), re.ASCII), text


BOUNDS = st.one_of(st.none(), st.integers(-1200, 1200))


@settings(max_examples=40)
@given(low=BOUNDS, high=BOUNDS, kind=st.sampled_from(["integer", "number"]), seed=st.integers(0, 2**32))
def test_numbers_keep_their_bounds(writer, low, high, kind, seed):
    schema = {"type": kind, "minimum": low, "maximum": high}
    schema = {word: value for word, value in schema.items() if value is not None}
    if low is not None and high is not None and low > high:
        with pytest.raises(ValueError, match="at least"):
            gbnf_of(schema)
        return
    value = json.loads(writer.write(gbnf_of(schema).text, seed))
    assert (low is None or value >= low) and (high is None or value <= high)
    assert isinstance(value, int) or kind == "number"


@pytest.mark.parametrize("low, high", [(0, 9), (7, 13), (18, 120), (-3, 3), (99, 1001), (-120, -18)])
def test_each_integer_between_bounds_can_be_written(low, high):
    rule = re.sub(r'" "|"|(?<=\)|\]|\}) (?=\[|\()|(?<=\|) | (?=\|)', "", integers(low, high)).replace(" ", "")
    found = {n for n in range(-2000, 2000) if re.fullmatch(f"(?:{rule})", str(n))}
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
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 1}, lambda v: v == [1]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 0}, lambda v: v == []),
        ({"type": ["string", "null"], "format": "date"}, lambda v: v is None or re.fullmatch(r"\d{4}-\d\d-\d\d", v)),
        ({"type": "string", "format": "ipv4"}, ipaddress.IPv4Address),
        ({"type": "string", "format": "uuid"}, uuid.UUID),
        ({"type": "string", "format": "email"}, lambda v: re.fullmatch(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)+", v)),
        ({"type": "string", "format": "date-time"}, lambda v: v[10] == "T" and (v[-1] == "Z" or v[-3] == ":")),
    ],
)  # fmt: skip
def test_schemas_that_people_write(writer, schema, is_followed):
    grammar = gbnf_of(schema)
    assert not grammar.loose
    texts = list(filter(None, (writer.write(grammar.text, seed) for seed in range(12))))
    assert texts and all(is_followed(json.loads(text)) for text in texts), texts


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
    assert gbnf_of({"type": kind, **older}) == gbnf_of({"type": kind, **newer})
    more = {"minimum": 5, "maximum": 9}
    both = ({"allOf": [{"type": kind, **one}, more]} for one in (older, newer))
    assert gbnf_of(next(both)) == gbnf_of(next(both))


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
    named = {"a.multipleOf", "b[].pattern", "b.uniqueItems", "c.format", "c.maxLength", "d.not"}
    assert set(gbnf_of(schema).loose) == named


@pytest.mark.parametrize(
    "schema, values, loose",
    [
        ({"type": "string", "enum": ["x", 1]}, ["x"], ()),
        ({"type": "integer", "enum": [1.0, 1.5, True, "1"]}, [1.0], ()),
        ({"type": ["null", "boolean"], "enum": [None, 0, True]}, [None, True], ()),
        ({"enum": [1, 2], "not": {"const": 1}}, [2], ()),
        ({"enum": ["a", "bbb", ""], "maxLength": 1, "minLength": 1}, ["a"], ()),
        ({"enum": [1, 50, "c"], "maximum": 9, "exclusiveMinimum": 0}, [1, "c"], ()),
        ({"enum": [3, 5, 6], "minimum": 3, "exclusiveMinimum": True, "multipleOf": 3}, [6], ()),
        ({"enum": ["ab", "b"], "pattern": "^a.*$"}, ["ab"], ()),
        ({"enum": ["ab", "b"], "pattern": "^(?=a)"}, ["ab", "b"], ("pattern",)),
        ({"enum": ["a", 1], "format": "x", "unheardOf": 5}, ["a", 1], ("format", "unheardOf")),
        ({"const": "a", "enum": ["a", "b"]}, ["a"], ()),
        ({"anyOf": [{"type": "integer"}, {"maxLength": 1}], "enum": ["x", "yy", 1]}, ["x", 1], ()),
        ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}, {"not": {"enum": [3]}}]}, [2], ()),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, [1, 3], ()),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ()),
        ({"$defs": {"A": {"type": "integer"}}, "$ref": "#/$defs/A", "enum": [1, "x"]}, [1], ()),
        ({"enum": [{"a": 1}, {"a": "x"}, {}], "required": ["a"], "properties": {"a": {"type": "string"}}},
         [{"a": "x"}], ()),
        ({"enum": [[1, 1], [1, 2], [3]], "uniqueItems": True, "minItems": 2, "items": {"maximum": 2}}, [[1, 2]], ()),
        ({"enum": [1, 2], "not": {"unheardOf": 1}}, [1, 2], ("not",)),
        ({"enum": [1, 2], "title": "T", "default": 1, "description": "d"}, [1, 2], ()),
    ],
)  # fmt: skip
def test_listed_values_keep_to_the_other_keywords(writer, schema, values, loose):
    grammar = gbnf_of(schema)
    assert grammar.loose == loose
    found = [json.loads(writer.write(grammar.text, seed)) for seed in range(24)]
    assert {json.dumps(value) for value in found} == {json.dumps(value) for value in values}


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "n": {"type": "integer"}}}


@pytest.mark.parametrize(
    "parts, loose",
    [
        ([{"type": "string"}, {"type": ["integer", "null"]}], ()),
        ([CAT, DOG], ()),
        ([{"$ref": "#/$defs/cat"}, DOG, {"type": "null"}], ()),
        ([{"type": "integer"}, {"type": "number"}], ("oneOf",)),
        ([DOG, DOG], ("oneOf",)),
        ([{"type": "string"}, {"maxLength": 3}], ("oneOf",)),
        ([{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}], ("oneOf",)),
    ],
)
def test_one_of_schemas_that_a_value_may_follow_together_is_named(parts, loose):
    assert gbnf_of({"$defs": {"cat": CAT}, "oneOf": parts}).loose == loose


def test_a_reference_that_recurs_with_something_beside_it(writer):
    following = {"anyOf": [{"$ref": "#/$defs/N", "nullable": True}, {"type": "null"}]}
    node = {"type": "object", "properties": {"next": following}, "required": ["next"]}
    grammar = gbnf_of({"$defs": {"N": node}, "$ref": "#/$defs/N", "nullable": True})
    assert set(grammar.loose) == {"nullable"}
    texts = list(filter(None, (writer.write(grammar.text, seed) for seed in range(12))))
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
        gbnf_of(schema)
