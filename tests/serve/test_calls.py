"""Reading calls out of answers, in pieces and whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfly_cpp.engine.markers import CLOSE, OPEN
from pyfly_cpp.engine.output import FINISH, Piece, Token
from pyfly_cpp.serve.calls import CallReader
from pyfly_cpp.serve.chat import chat_completion
from pyfly_cpp.serve.messages import Message
from pyfly_cpp.serve.requests import ChatRequest, MessageRequest, ResponseRequest
from pyfly_cpp.serve.responses import Response
from pyfly_cpp.serve.tools import Tools, read_arguments

MESSAGES = [{"role": "user", "content": "Hi"}]
FUNCTIONS = [
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}
]


def call(**arguments):
    return f"{OPEN}\n{json.dumps({'name': 'add', 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def xml(**arguments):
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"{OPEN}\n<function=add>\n{values}</function>\n{CLOSE}"


def read(pieces, one_alone=False):
    reader = CallReader(Tools(FUNCTIONS, "auto", None, ""), one_alone)
    text = "".join(map(reader.add, pieces)) + reader.end()
    assert all(call.name == "add" for call in reader.calls)
    return text, [parsed(call.arguments) for call in reader.calls]


def parsed(arguments):
    """What they are; a call that breaks off has the text as far as it came."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize(
    "answer, text, calls",
    [
        ("Just text with <b> and {}.", "Just text with <b> and {}.", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [{"a": 1}]),
        ('So: <tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "So: ", [{"a": 1}]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [{"a": 1}]),
        (
            '<tool_call>{"name":"add","arguments":{}}</tool_call>\n<tool_call>{"name":"add","arguments":{"a":2}}'
            "</tool_call>",
            "",
            [{}, {"a": 2}],
        ),
        ('{"name": "add", "parameters": {"a": 3}}', "", [{"a": 3}]),
        ('[{"name": "add", "arguments": {"a": 3}}]', "", [{"a": 3}]),
        ('```json\n{"name": "add", "arguments": {"a": 3}}\n```', "", [{"a": 3}]),
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n4\n</parameter>\n<parameter=s>\n5\n</parameter>\n</function>\n"
            "</tool_call>",
            "",
            [{"a": 4, "s": "5"}],
        ),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ("<tool_call>not JSON</tool_call>\n.", "<tool_call>not JSON</tool_call>\n.", []),
        ('{"name": "add", "arguments": {"a": 1}}; {"name": "add", "arguments": {"a": 2}}\n', "", [{"a": 1}, {"a": 2}]),
        ('{"name": "add", "arguments": {"a": 1}} and so on', "and so on", [{"a": 1}]),
        # Marks inside of strings and values.
        (call(s="</tool_call>"), "", [{"s": "</tool_call>"}]),
        (call(s='\\"</tool_call><tool_call>') + call(a=2), "", [{"s": '\\"</tool_call><tool_call>'}, {"a": 2}]),
        (f'{{"name": "add", "arguments": {{"s": "{OPEN}"}}}}', "", [{"s": OPEN}]),
        (xml(s="a</parameter>b</function>\n</tool_call>"), "", [{"s": "a</parameter>b</function>\n</tool_call>"}]),
        # Marks that are one too many, or one too few.
        (f"{OPEN}\n{call(a=1)}", "", [{"a": 1}]),
        (f"{OPEN}{call(a=1)}\n{CLOSE}\n{CLOSE}\nSo.", "So.", [{"a": 1}]),
        (f"With {OPEN} I call.\n{call(a=1)}", f"With {OPEN} I call.\n", [{"a": 1}]),
        (f"{OPEN}{call(s=CLOSE)}", "", [{"s": CLOSE}]),
        (call(a=1).replace(CLOSE, "") + call(a=2), "", [{"a": 1}, {"a": 2}]),
        (call(a=1).replace(OPEN, ""), "", [{"a": 1}]),
        (f"{OPEN}{OPEN} so {CLOSE}{OPEN}", f"{OPEN}{OPEN} so {CLOSE}{OPEN}", []),
        # What breaks off behind a name that is known is a call, as far as it came.
        ('<tool_call>{"name": "add", "arguments": {"s": "a', "", ['{"s": "a']),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>.', ".", ['{"a": ']),
        # What breaks off within a closing marker is a whole call.
        (call(a=1)[:-5], "", [{"a": 1}]),
        (f'{OPEN}[{{"name": "add", "arguments": {{"a": 1}}}}]\n</', "", [{"a": 1}]),
        (call(a=1) + "\n</tool", "", [{"a": 1}]),
        (f"{OPEN}not JSON</tool", f"{OPEN}not JSON</tool", []),
        # A broken call does not take the next with it.
        (f'{OPEN}{{"name": "add, {{}}{CLOSE}{call(a=1)}', f'{OPEN}{{"name": "add, {{}}{CLOSE}', [{"a": 1}]),
        (
            f"{OPEN}<function=add><parameter=s>{CLOSE}{call(a=1)}",
            f"{OPEN}<function=add><parameter=s>{CLOSE}",
            [{"a": 1}],
        ),
        (xml(a=1).replace(OPEN, "").replace(CLOSE, ""), "", [{"a": 1}]),
        # Arguments.
        (f'{OPEN}{{"name": "add"}}{CLOSE}', "", [{}]),
        (f'{OPEN}{{"name": "add", "arguments": null}}{CLOSE}', "", [{}]),
        (f'{OPEN}{{"name": "add", "arguments": ""}}{CLOSE}', "", [{}]),
        (f'{OPEN}{{"name": "add", "arguments": {{"s": "a\n\tb"}}}}{CLOSE}', "", [{"s": "a\n\tb"}]),
        ('[{"name": "add", "description": "adds"}]', '[{"name": "add", "description": "adds"}]', []),
        ('{"name": "add", "arguments": {"a": NaN}}', "", ['{"a": ']),
        ('[{"name": "add", "arguments": {"a": NaN}}]', '[{"name": "add", "arguments": {"a": NaN}}]', []),
        (xml(a="1e999"), "", [{"a": "1e999"}]),
        ("a < b <tool", "a < b <tool", []),
    ],
)
def test_calls_are_read(answer, text, calls):
    for size in (1, 3, len(answer)):
        assert read([answer[i : i + size] for i in range(0, len(answer), size)]) == (text, calls)


PARTS = [OPEN, CLOSE, "<function=add>", "</function>", "<parameter=s>", "</parameter>", '"', "\\", "{", "}", "[", "]",
         '{"name": "add"', ', "arguments": {"s": "', "\n", " ", "a", "<", "```json", ":", "é"]  # fmt: skip
CUTS = st.lists(st.integers(0, 400), max_size=12)


def cut(answer, cuts):
    places = sorted({0, len(answer), *(place for place in cuts if place < len(answer))})
    return [answer[i:j] for i, j in zip(places, places[1:])]


@settings(max_examples=300)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=30), cuts=CUTS)
def test_any_cuts_give_the_same(parts, cuts):
    answer = "".join(parts)
    text, calls = read([answer])
    assert read(cut(answer, cuts)) == (text, calls) == read(answer)
    assert calls or text == answer


def test_arguments_come_while_they_are_written():
    reader = CallReader(Tools(FUNCTIONS, "auto", None, ""), False)
    answer, seen = call(s='a"}</tool_call>\n', a=1), []
    for c in answer:
        assert reader.add(c) == ""
        seen.append(reader.calls[0].arguments if reader.calls else "")
    wanted = json.dumps({"s": 'a"}</tool_call>\n', "a": 1})
    begun = answer.index("{", answer.index("{") + 1)
    assert seen[begun:][: len(wanted)] == [wanted[:n] for n in range(1, len(wanted) + 1)]
    assert len({one.id for one in reader.calls}) == 1 and reader.end() == ""


@pytest.mark.parametrize("answer", ['{"x": 1', '{"name": "ada', '```json\n{"nam_', '[{"names', "[1"])
def test_what_begins_like_no_call_is_not_held_back(answer):
    reader = CallReader(Tools(FUNCTIONS, "auto", None, ""), False)
    assert "".join(map(reader.add, answer)) == answer


VALUES = st.lists(st.sampled_from([*PARTS, "x", "</tool", "\t"]), max_size=8).map("".join)
WORDS = st.sampled_from(["", "So: ", 'He said "no". ', f"With {OPEN} I call. ", "1 < 2\n"])


@settings(max_examples=300)
@given(
    answers=st.lists(st.tuples(WORDS, VALUES, st.sampled_from([call, xml]), st.booleans()), min_size=1, max_size=3),
    cuts=CUTS,
)
def test_no_call_is_lost(answers, cuts):
    """Whatever marks its strings hold, and whatever text or second opening stands before it."""
    answer, expected, said = "", [], ""
    for words, value, written, is_doubled in answers:
        if written is xml and "</parameter>" in value:  # what ends a value cannot stand in it, with what follows it
            written = call
        answer += f"{words}{OPEN if is_doubled else ''}{written(s=value)}\n"
        said += words
        expected.append({"s": value})
    text, calls = read(cut(answer, cuts))
    assert calls == expected
    assert text.split() == said.split()


def test_halves_of_surrogate_pairs_stay_escaped():
    reader = CallReader(Tools(FUNCTIONS, "auto", None, ""), False)
    reader.add(call(s="x").replace("x", "\\ud83d"))
    (got,) = reader.calls
    assert json.loads(got.arguments) == {"s": "\ud83d"} and got.arguments.isascii()


OF_PROTOCOL = {
    chat_completion: {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTIONS[0]}]},
    Response: {"input": "Hi", "tools": [{"type": "function", **FUNCTIONS[0]}]},
    Message: {"messages": MESSAGES, "max_tokens": 100, "tools": [{"name": "add", "input_schema": {"type": "object"}}]},
}


def told(kind, server, *pieces, cause="length", stopped_by="", **fields):
    """The events of an answer that comes in these pieces, and the whole of it."""
    model = {chat_completion: ChatRequest, Response: ResponseRequest, Message: MessageRequest}[kind]
    body = model(**OF_PROTOCOL[kind], **fields)
    answer = kind(server.service.model, server.service.settings, body, server.service.model.decoding)
    events = []
    for n, text in enumerate(pieces, 1):
        piece = Piece(text, (Token(0, text),), n)
        last = piece._replace(finish=FINISH[cause], cause=cause, stop_string=stopped_by)
        events += answer.add(0, last if n == len(pieces) else piece)
    return [*events, *(answer.end() if kind is not chat_completion else ())], answer.whole()


@pytest.mark.parametrize("kind", OF_PROTOCOL)
def test_text_behind_a_call_comes_behind_its_arguments(kind, server):
    events, whole = told(kind, server, f'{OPEN}\n{{"name": "add", "arguments": {{"a": 1', "}}\nDone")
    deltas = {
        chat_completion: lambda: [choice["delta"] for event in events for choice in event["choices"]],
        Response: lambda: [event["delta"] for event in events if event["type"].endswith(".delta")],
        Message: lambda: [event["delta"] for event in events if event["type"] == "content_block_delta"],
    }[kind]()
    text, last = (json.dumps(delta) for delta in (deltas[-2:] if kind is not chat_completion else deltas[-3:-1])[::-1])
    assert "Done" in text and "}" in last and "Done" not in last
    assert "Done" in json.dumps(whole)


TORN = f'{OPEN}\n{{"name": "add", "arguments": {{"a": 1'
WHOLE = f'{OPEN}\n{{"name": "add", "arguments": {{"a": 1}}'


def reason_of(kind, whole):
    """The reason of the end, and why it is incomplete."""
    if kind is chat_completion:
        return whole["choices"][0]["finish_reason"]
    if kind is Message:
        return whole["stop_reason"], whole["stop_sequence"]
    return whole["status"], [item["status"] for item in whole["output"]], whole["incomplete_details"]


def input_of(kind, whole):
    if kind is chat_completion:
        return whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    return whole["output"][0]["arguments"] if kind is Response else whole["content"][0]["input"]


@pytest.mark.parametrize(
    "kind, cause, reason",
    [
        *((chat_completion, cause, "length") for cause in ("length", "stop", "eog", "context")),
        (Message, "length", ("max_tokens", None)), (Message, "stop", ("stop_sequence", "b")),
        (Message, "eog", ("max_tokens", None)),
        (Response, "length", ("incomplete", ["incomplete"], {"reason": "max_output_tokens"})),
        (Response, "stop", ("incomplete", ["incomplete"], {"reason": None})),
        (Response, "eog", ("incomplete", ["incomplete"], {"reason": None})),
    ],
)  # fmt: skip
def test_a_call_that_breaks_off_is_not_told_as_a_whole_one(server, kind, cause, reason):
    fields = {"stop_sequences" if kind is Message else "stop": ["b"]}
    events, whole = told(kind, server, TORN, cause=cause, stopped_by="b" if cause == "stop" else "", **fields)
    assert reason_of(kind, whole) == reason
    assert input_of(kind, whole) == ({"INVALID_JSON": '{"a": 1'} if kind is Message else '{"a": 1')
    if kind is chat_completion:
        assert events[-1]["choices"][0]["finish_reason"] == reason
    elif kind is Message:
        assert events[-2]["delta"] == {"stop_reason": reason[0], "stop_sequence": reason[1]}
    else:
        assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize(
    "kind, reason",
    [
        (chat_completion, "tool_calls"), (Message, ("tool_use", None)), (Response, ("completed", ["completed"], None)),
    ],
)  # fmt: skip
def test_a_call_whose_arguments_are_there_is_whole(server, kind, reason):
    for cause in ("stop", "eog"):
        assert reason_of(kind, told(kind, server, WHOLE, cause=cause, stopped_by="}")[1]) == reason


def test_a_broken_call_before_another_is_not_told_as_a_whole_one(server):
    _, whole = told(Response, server, TORN.replace("1", "NaN") + CLOSE, call(a=2), cause="eog")
    assert [item["status"] for item in whole["output"]] == ["incomplete", "completed"]
    assert whole["status"] == "incomplete"


CITY = {"type": "object", "properties": {"a": {"enum": ["Oslo", "Rome"]}, "b": {"const": 1}}, "required": ["a", "b"]}


def test_a_stop_string_within_a_call(server):
    """On all routes that tell of calls; the text before its name is no call."""
    tool = {"type": "function", "function": {"name": "add", "parameters": CITY}}
    body = {"messages": MESSAGES, "max_tokens": 100, "stop": ['b"']}
    chat = server.post("/v1/chat/completions", tools=[tool], tool_choice="required", **body).json()["choices"][0]
    assert chat["finish_reason"] == "length" and chat["message"]["tool_calls"]
    older = {"functions": [tool["function"]], "function_call": {"name": "add"}}
    old = server.post("/v1/chat/completions", **older, **body).json()["choices"][0]
    assert old["finish_reason"] == "length" and old["message"]["function_call"]
    response = {"input": "Hi", "tools": [{"type": "function", **tool["function"]}], "tool_choice": "required"}
    events = server.events("/v1/responses", max_output_tokens=100, stop=['b"'], **response)
    assert events[-1]["type"] == "response.incomplete"
    messages = {"messages": MESSAGES, "tools": [{"name": "add", "input_schema": CITY}], "tool_choice": {"type": "any"}}
    message = server.post("/v1/messages", max_tokens=100, stop_sequences=['b"'], **messages).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", 'b"')
    assert message["content"][0]["input"].keys() == {"INVALID_JSON"}
    chat = server.post("/v1/chat/completions", tools=[tool], tool_choice="required", **{**body, "stop": "name"})
    (choice,) = chat.json()["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


BROKEN = ['{"a": "Os', "", "null", "[1]", "3", "{", '{"a": NaN}', '{"a": "\\ud83d"}', "[" * 99]


@pytest.mark.parametrize("arguments", BROKEN)
def test_a_history_with_a_broken_call_is_served(server, arguments):
    called = {"name": "add", "arguments": arguments}
    tool = {"type": "function", "function": {"name": "add", "parameters": CITY}}
    for own in ({"tool_calls": [{"id": "1", "type": "function", "function": called}]}, {"function_call": called}):
        messages = [*MESSAGES, {"role": "assistant", "content": None, **own},
                    {"role": "tool", "tool_call_id": "1", "content": "error"}, *MESSAGES]  # fmt: skip
        got = server.post("/v1/chat/completions", messages=messages, tools=[tool], max_tokens=1)
        assert got.status_code == 200, got.text
    items = [*MESSAGES, {"type": "function_call", "call_id": "1", **called},
             {"type": "function_call_output", "call_id": "1", "output": "error"}]  # fmt: skip
    assert server.post("/v1/responses", input=items, max_output_tokens=1).status_code == 200
    blocks = [{"type": "tool_use", "id": "1", "name": "add", "input": arguments}]
    result = [{"type": "tool_result", "tool_use_id": "1", "content": "error"}]
    history = [*MESSAGES, {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    assert server.post("/v1/messages", messages=history, max_tokens=1).status_code == 200


def test_arguments_as_templates_take_them():
    assert [read_arguments(text) for text in ('{"a": 1}', " ", "null", "[1]", '{"a": "Os')] == [
        {"a": 1}, {}, {}, {"INVALID_JSON": "[1]"}, {"INVALID_JSON": '{"a": "Os'},
    ]  # fmt: skip


def test_the_first_alone():
    assert read([call(a=1) + call(a=2)], one_alone=True) == ("", [{"a": 1}])


@pytest.mark.parametrize(
    "part", [f'{OPEN}{{\\"', f"{OPEN}<function=add><parameter=s>", CLOSE, f"{OPEN}[", "</parameter>"]
)
def test_long_answers_are_read_in_time(part):
    """A part that begins something and never ends it takes no time that grows with its square."""
    answer = OPEN + "<function=add><parameter=s>" * part.startswith("</p") + part * 4000
    assert read(cut(answer, range(0, len(answer), 97))) == (answer, [])
