"""/v1/messages: Anthropic's protocol."""

from __future__ import annotations

import json

import pytest

PATH = "/v1/messages"
QUESTION = "Tom has 3 apples and 4 pears. How many fruits?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {
    "name": "add", "description": "Adds.",
    "input_schema": {
        "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}, "required": ["a", "b"],
    },
}  # fmt: skip


def n_read(message):
    """The tokens of the prompt: this protocol counts those that were cached by themselves."""
    return message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]


def assembled(events):
    """The message that the events of a stream tell."""
    message = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                block["partial"] += delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                block[kind] += delta[kind]
        elif event["type"] == "message_delta":
            message.update(event["delta"], usage=event["usage"])
    for block in message["content"]:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    return message


def test_an_empty_stop_sequence_stops_nothing(server):
    got = server.post(PATH, messages=MESSAGES, max_tokens=5, stop_sequences=[""]).json()
    assert (got["stop_reason"], got["stop_sequence"]) == ("max_tokens", None)


def test_a_message_is_the_chat_completion(server):
    body = {"messages": MESSAGES, "system": [{"type": "text", "text": "Be short."}], "max_tokens": 12}
    got = server.post(PATH, **body, stop_sequences=["zzz"]).json()
    chat = [{"role": "system", "content": "Be short."}, *MESSAGES]
    same = server.post("/v1/chat/completions", messages=chat, max_tokens=12).json()
    (block,) = got["content"]
    assert block == {"type": "text", "text": same["choices"][0]["message"]["content"]}
    assert got["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[same["choices"][0]["finish_reason"]]
    assert (n_read(got), got["usage"]["output_tokens"]) == tuple(same["usage"].values())[:2]
    events = server.events(PATH, **body)
    streamed = assembled(events)
    assert n_read(streamed) == n_read(got) and streamed["usage"]["cache_read_input_tokens"] > 1
    assert {**streamed, "id": got["id"], "usage": got["usage"]} == got
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    counted = server.post(f"{PATH}/count_tokens", messages=MESSAGES, system="Be short.").json()
    assert counted == {"input_tokens": n_read(got)}


def test_calls_and_their_results(server):
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 80}
    got = server.post(PATH, **body).json()
    (call,) = got["content"]
    assert got["stop_reason"] == "tool_use" and call["input"] in ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    (streamed,) = assembled(server.events(PATH, **body))["content"]
    assert streamed["input"] == call["input"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "4"}]}
    thought = {"type": "thinking", "thinking": "So.", "signature": ""}
    history = [
        *MESSAGES, {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]  # fmt: skip
    follow = server.post(PATH, messages=history, tools=[TOOL], max_tokens=4).json()
    assert follow["type"] == "message"
    calls = [{"function": {"name": "add", "arguments": call["input"]}}]
    chat = [
        *MESSAGES, {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": calls},
        {"role": "tool", "content": "4"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {**TOOL, "parameters": TOOL["input_schema"]}}]
    for tool in tools:
        del tool["function"]["input_schema"]
    same = server.post("/v1/chat/completions", messages=chat, tools=tools, max_tokens=4).json()
    assert n_read(follow) == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
         "messages[0].content[0].content"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"gate": "margin:-1"}, "gate"),
    ],
)  # fmt: skip
def test_what_cannot_be(server, fields, param):
    got = server.post(PATH, **{"messages": MESSAGES, "max_tokens": 1, **fields})
    assert got.status_code == 400, got.text
    assert (got.json()["type"], got.json()["error"]["param"]) == ("error", param)


def test_a_format(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    body = {"messages": MESSAGES, "max_tokens": 60, "output_config": config}
    (block,) = server.post(PATH, **body).json()["content"]
    assert json.loads(block["text"])["a"] in (1, 2)
    assert server.post(f"{PATH}/count_tokens", messages=MESSAGES, output_config=config).status_code == 200


def test_a_stop_sequence_is_named(server):
    text = server.post(PATH, messages=MESSAGES, max_tokens=12).json()["content"][0]["text"]
    body = {"messages": MESSAGES, "max_tokens": 12, "stop_sequences": ["zzz", text[2:5]]}
    got = server.post(PATH, **body).json()
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", text[2:5])
    delta = server.events(PATH, **body)[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": text[2:5]}


def test_threads_are_refused_in_the_words_that_clients_know(server):
    got = server.post(PATH, messages=MESSAGES, max_tokens=1, thread={"type": "create"})
    assert got.status_code == 400
    assert got.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
