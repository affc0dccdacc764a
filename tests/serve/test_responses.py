"""What /v1/responses makes of its input."""

from __future__ import annotations

import pytest

PATH = "/v1/responses"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TURN = "Tom has 3 apples and buys 4 more. How many apples does Tom have now? "


def called(n):
    return {"type": "function_call", "call_id": str(n), "name": "f", "arguments": f'{{"a": "{n}"}}'}


def in_chat(n):
    return {"id": str(n), "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{n}"}}'}}


def result(n):
    return {"type": "function_call_output", "call_id": str(n), "output": "p"}, {
        "role": "tool", "tool_call_id": str(n), "content": "p",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "So: "])
def test_the_items_of_an_answer_are_one_message(server, text):
    """Text and calls of one turn, as a chat has them; after results, the next turn begins."""
    said = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}] * bool(text)
    thought = {"type": "reasoning", "content": [], "summary": []}
    items = [{"role": "user", "content": "Hi"}, thought, *said, called(1), thought, called(2), result(1)[0],
             result(2)[0], called(3), result(3)[0]]  # fmt: skip
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": text, "tool_calls": [in_chat(1), in_chat(2)]}, result(1)[1], result(2)[1],
        {"role": "assistant", "content": "", "tool_calls": [in_chat(3)]}, result(3)[1],
    ]  # fmt: skip
    tools = [{"type": "function", **FUNCTION}]
    got = server.post(PATH, input=items, tools=tools, max_output_tokens=1).json()["usage"]
    same = [{"type": "function", "function": FUNCTION}]
    chat = server.post("/v1/chat/completions/input_tokens", messages=messages, tools=same).json()
    assert got["input_tokens"] == chat["input_tokens"]


@pytest.mark.parametrize("instructions", [None, "Be short."])
def test_first_turns_that_do_not_fit_are_dropped_if_a_request_allows_it(server, instructions):
    turns = [{"role": role, "content": f"{i} {TURN}"} for i in range(20) for role in ("user", "assistant")][:-1]
    body = {"input": turns, "instructions": instructions, "max_output_tokens": 4}
    refused = server.post(PATH, **body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    got = server.post(PATH, **body, truncation="auto").json()
    assert got["truncation"] == "auto"
    n = got["usage"]["input_tokens"]
    kept = [*([{"role": "system", "content": instructions}] if instructions else [])]
    counts = [
        server.post("/v1/chat/completions/input_tokens", messages=[*kept, *turns[i:]]).json()["input_tokens"]
        for i in range(0, len(turns), 2)
    ]
    n_ctx = server.service.model.batch.n_ctx
    assert n == max(count for count in counts if count < n_ctx)
    too_long = server.post(PATH, input=TURN * 40, max_output_tokens=4, truncation="auto")
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_it_has_every_field_of_the_openai_package(server):
    types = pytest.importorskip("openai.types.responses")
    for body in ({"input": "Hi"}, {"input": "Hi", "stop": ["zz"], "truncation": "auto"}):
        got = server.post(PATH, **body, max_output_tokens=4).json()
        types.Response.model_validate(got)
