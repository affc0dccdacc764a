"""response_format: a JSON schema is followed, in whatever form it is sent, and nothing is ignored."""

from __future__ import annotations

import json

import llama_cpp
import pytest
from llama_cpp import LlamaGrammar

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama, PromptLookup
from pyfly_cpp.grammar.guides import Guide
from pyfly_cpp.llama.strict_grammars import with_strict_strings

F32 = llama_cpp.GGML_TYPE_F32
OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
MESSAGES = [{"role": "user", "content": "How many apples has Tom?"}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [3, 4, 7]}}, "required": ["n"]}
FORMS = [
    {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}},
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "json_schema", "json_schema": None, "schema": SCHEMA},
    {"type": "json_object", "schema": SCHEMA},
]


def content(answer):
    return answer["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def llm(tiny_target):
    llm = FlyLlama(tiny_target, drafter="lookup", window="reconverge:6", **OPTIONS)
    yield llm
    llm.close()


@pytest.mark.parametrize("form", FORMS, ids=["openai", "beside", "null", "json_object"])
def test_a_schema_is_followed(llm, form):
    answer = json.loads(content(llm.create_chat_completion(MESSAGES, response_format=form, max_tokens=40)))
    assert list(answer) == ["n"] and answer["n"] in (3, 4, 7)
    pieces = llm.create_chat_completion(MESSAGES, response_format=form, max_tokens=40, stream=True)
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert json.loads(text).keys() == {"n"}


PEOPLE = {
    "type": "array", "minItems": 2, "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
    },
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_change_no_token_of_an_answer_with_a_schema(tiny_target_f32, tiny_draft, temperature):
    form = {"type": "json_schema", "schema": PEOPLE}
    options = {**OPTIONS, "n_ctx": 512, "type_k": F32, "type_v": F32}
    answers, drafted = [], 0
    for drafter in (None, PromptLookup(num_pred_tokens=6), DraftModel(tiny_draft, draft_max=5)):
        with FlyLlama(tiny_target_f32, drafter=drafter, adaptive=False, **options) as llm:
            given = {"response_format": form, "temperature": temperature, "max_tokens": 150}
            answers.append([content(llm.create_chat_completion(MESSAGES, seed=seed, **given)) for seed in range(3)])
            drafted += llm.stats.matched
    assert answers[0] == answers[1] == answers[2] and drafted > 20


@pytest.mark.parametrize("failure", [ValueError("too large"), KeyboardInterrupt()])
def test_what_a_guide_raises_ends_the_answer_alone(llm, monkeypatch, failure):
    fill, n_left = Guide.fill, 5

    def failing(self, tokens, bits):
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise failure
        fill(self, tokens, bits)

    monkeypatch.setattr(Guide, "fill", failing)
    with pytest.raises(type(failure)):
        llm.create_chat_completion(MESSAGES, response_format=FORMS[0], max_tokens=40)
    assert n_left < 0
    monkeypatch.undo()
    answer = llm.create_chat_completion(MESSAGES, response_format=FORMS[0], max_tokens=40)
    assert json.loads(content(answer)).keys() == {"n"}


@pytest.mark.parametrize(
    "schema", [{}, {"title": "Answer"}, {"description": "any", "additionalProperties": {"type": "null"}}]
)
def test_a_json_object_is_an_object(llm, schema):
    """Also if its schema names no type."""
    form, digit = {"type": "json_object", "schema": schema}, llm.tokenize(b"7", add_bos=False)[-1]
    options = {"logit_bias": {digit: 30.0}, "max_tokens": 8, "temperature": 0}
    assert content(llm.create_chat_completion(MESSAGES, response_format=form, **options)).startswith("{")


STRING = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 12}}, "required": ["s"]}


def towards_line_ends(llm):
    (newline,) = llm.tokenize(b"\n", add_bos=False)
    return {"logit_bias": {newline: 12.0}, "temperature": 1.0, "max_tokens": 60}


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_strings_hold_no_line_ends(llm, kind):
    """However much the model would like one."""
    for seed in range(1, 9):
        answer = llm.create_chat_completion(
            MESSAGES, response_format={"type": kind, "schema": STRING}, seed=seed, **towards_line_ends(llm)
        )
        assert json.loads(content(answer)).keys() == {"s"}


def test_nor_do_those_of_a_call(llm):
    tool = {"type": "function", "function": {"name": "say", "parameters": STRING}}
    named = {"type": "function", "function": {"name": "say"}}
    for seed in range(1, 9):
        answer = llm.create_chat_completion(
            MESSAGES, tools=[tool], tool_choice=named, seed=seed, **towards_line_ends(llm)
        )
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"s"}


CONSTANT = {"type": "object", "properties": {"s": {"const": 'a"\\n\n'}, "t": {"pattern": '^"{2}\\\\$'}}}
CONSTANT["required"] = ["s", "t"]


@pytest.mark.parametrize("form", ["tools", "functions"])
def test_constants_and_patterns_of_a_call_are_those_of_the_schema(llm, form):
    """llama-cpp-python escapes neither for its grammar."""
    function = {"name": "say", "parameters": CONSTANT}
    options = {"functions": [function], "function_call": {"name": "say"}}
    if form == "tools":
        named = {"type": "function", "function": {"name": "say"}}
        options = {"tools": [{"type": "function", "function": function}], "tool_choice": named}
    answer = llm.create_chat_completion(MESSAGES, max_tokens=80, **options)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"s": 'a"\\n\n', "t": '""\\'}


def between(low, high):
    return {"type": "object", "properties": {"n": {"type": "integer", "minimum": low, "maximum": high}}}


@pytest.mark.parametrize("chat_format", [None, "chatml-function-calling"])
def test_each_call_follows_its_own_schema(tiny_target, chat_format):
    """llama-cpp-python makes the same grammar of schemas that differ in their bounds alone."""
    bounds = {"f": (100, 200), "g": (-9, -5), "h": (1000, 2000)}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**between(*of), "required": ["n"]}}}
        for name, of in bounds.items()
    ]
    with FlyBatch(tiny_target, 3, chat_format=chat_format, **OPTIONS) as batch:
        handles = {
            name: batch.submit(
                MESSAGES, tools=tools, tool_choice={"type": "function", "function": {"name": name}}, max_tokens=40
            )
            for name in bounds
        }
        for name, (low, high) in bounds.items():
            (call,) = handles[name].result()["choices"][0]["message"]["tool_calls"]
            assert low <= json.loads(call["function"]["arguments"])["n"] <= high


def test_grammars_of_the_caller_are_not_those_of_tools(llm):
    tool = {"type": "function", "function": {"name": "f", "parameters": between(100, 200)}}
    llm.create_chat_completion(MESSAGES, tools=[tool], max_tokens=1)
    own = LlamaGrammar.from_json_schema(
        json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}}), verbose=False
    )
    assert "integral-part" in with_strict_strings(own)._grammar


def test_a_tool_that_cannot_be_followed_is_refused_where_it_is_named(llm):
    tool = {"type": "function", "function": {"name": "say", "parameters": {"type": "nothing"}}}
    named = {"type": "function", "function": {"name": "say"}}
    with pytest.raises(ValueError, match="schema of the tool 'say'"):
        llm.create_chat_completion(MESSAGES, tools=[tool], tool_choice=named)
    assert llm.create_chat_completion(MESSAGES, tools=[tool], max_tokens=2)["choices"]


RECURSIVE = {
    "type": "object", "required": ["v"], "additionalProperties": False,
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}  # fmt: skip
PATTERN = {**RECURSIVE, "properties": {"v": {"type": "string", "pattern": "[a-z]+"}}}


def called(llm, parameters, **options):
    """The arguments of a call of the one tool, which is given as an iterator."""
    tools = iter([{"type": "function", "function": {"name": "say", "parameters": parameters}}])
    choice = {"type": "function", "function": {"name": "say"}}
    answer = llm.create_chat_completion(MESSAGES, tools=tools, tool_choice=choice, max_tokens=80, **options)
    return answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("schema", [RECURSIVE, PATTERN], ids=["recursive", "pattern"])
def test_what_llama_cpp_python_cannot_convert_is_followed(llm, schema):
    assert called(llm, schema).replace(" ", "").startswith('{"v":')


def test_arguments_of_a_tool_without_a_schema_are_an_object(llm):
    digit = llm.tokenize(b"7", add_bos=False)[-1]
    assert called(llm, {}, logit_bias={digit: 30.0}).startswith("{")


def test_a_grammar_of_ones_own_is_the_same_after_a_call(llm):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 13, "maximum": 17}}}
    own = LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)

    def answer():
        return llm.create_completion("Tom has", grammar=own, max_tokens=24, temperature=0)["choices"][0]["text"]

    before = answer()
    called(llm, schema)
    assert answer() == before


def test_other_formats_stay(llm):
    plain = llm.create_chat_completion(MESSAGES, max_tokens=12, temperature=0)
    text = llm.create_chat_completion(MESSAGES, response_format={"type": "text"}, max_tokens=12, temperature=0)
    assert content(text) == content(plain)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("json", "response_format must be .* not 'json'"),
        ({}, "response_format must be"),
        ({"type": "xml"}, "response_format must be"),
        ({"type": "json_schema"}, "the type json_schema and no schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "the type json_schema and no schema"),
        ({"type": "json_schema", "schema": {"type": "nothing"}}, "cannot be followed .*nothing"),
        ({"type": "json_schema", "schema": {1, 2}}, "is not JSON"),
        ({"type": "json_schema", "schema": {"const": float("nan")}}, "is not valid JSON: NaN"),
        ({"type": "json_object", "schema": {"type": "nothing"}}, "cannot be followed .*nothing"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(llm, form, message):
    with pytest.raises(ValueError, match=message):
        llm.create_chat_completion(MESSAGES, response_format=form)
    assert llm(MESSAGES[0]["content"], max_tokens=2)["choices"]


def test_keywords_that_a_grammar_cannot_enforce_are_warned_of(llm):
    form = {"type": "json_schema", "schema": {"type": "string", "pattern": "^(?=x)y$"}}
    with pytest.warns(UserWarning, match="cannot enforce pattern"):
        llm.create_chat_completion(MESSAGES, response_format=form, max_tokens=2)
