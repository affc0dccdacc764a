"""Whatever is sent, the answer is an error of the client's in the protocol's shape, and the server goes on."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import weakref

import pytest

from pyfly_cpp.serve.body import parse
from pyfly_cpp.serve.requests import ChatRequest, CompletionRequest, ResponseRequest

N_BODIES = 500
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
GOOD = {CHAT: {"messages": MESSAGES, "max_tokens": 1}, TEXT: {"prompt": "Hi", "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1}}  # fmt: skip

# Of every field, values that cannot be; None would be as good as nothing.
WRONG = {
    "temperature": [-1, 101, "hot", True, [], {}, 1e300],
    "top_p": [-0.1, 1.1, "x", []],
    "top_k": [-2, 1.5, "x", 2**40],
    "min_p": [2, "x"],
    "seed": [1.5, "x", 2**70, [], True],
    "stop": [5, {}, [1], ["x" * 300], ["x"] * 1025, [[]]],
    "stream": ["yes", 1, []],
    "logit_bias": [
        "x",
        {"99999999": 1},
        {"1": "x"},
        {"1": 101},
        {"1": None},
        {"1": True},
        [1],
        [[1]],
        [[1, 101]],
        [[1, True]],
        [[1, "x"]],
        [[99999999, 1]],
        [[1.5, 1]],
        [[-1, 1]],
    ],
    "json_schema": [5, [], {"type": "x"}],
    "ignore_eos": [1, "x"],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3, []],
    "repeat_penalty": [-1, 0, 11],
    "mirostat_mode": [3, -1, "x"],
    "grammar": [5, [], "x", "root ::= root", 'root ::= "a\0"', "root ::= undefined"],
    "gate": [5, "margin:-1", "nothing:1", "all(" * 50 + "x", "exact-first:2", "margin:nan", "m" * 300, {}],
    "window": [5, "agree:-1", "x", "agree:99999999999", []],
    "draft_max": [-1, 1.5, "x", 10**6, 2**40],
    "speculative": ["no", 1],
    "records": [1, "x"],
    "stop_loops": [1, "x"],
    "model": [5, [], {}],
    "user": [5],
}
OF_TEXT = {
    "prompt": [None, 5, {}, [], [[]], [-1], [10**6], [[1], 5], [1.5], [True], {"content": "x"},
               "\ud800", "x" * 10**5],
    "n": [0, -1, 10**9, 1.5, "x", 129],
    "max_tokens": [-2, 1.5, "x", 2**40],
    "logprobs": [-1, 21, "x", True, 1.5],
    "echo": ["x", 1],
    "best_of": [2, -1, "x"],
    "suffix": [5, []],
    "response_format": ["json", {}, {"type": "x"}, {"type": "json_schema"}, {"type": "json_object", "schema": 5},
                        {"type": "json_object", "schema": {"type": "x"}}],
}  # fmt: skip
OF_CHAT = {
    "messages": [None, "x", [], {}, [5], [{}], [{"role": "x", "content": "y"}], [{"role": "user", "content": 5}],
                 [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                 [{"role": "user", "content": [{"text": "x"}]}], [{"role": "user", "content": "\udfff"}],
                 [{"role": "assistant", "tool_calls": [{}]}], [{"role": "assistant", "tool_calls": "x"}],
                 [{"role": "user", "content": "x" * 10**5}]],
    "n": OF_TEXT["n"],
    "max_tokens": [-2, "x"],
    "max_completion_tokens": [-2, "x"],
    "logprobs": [1, "x"],
    "top_logprobs": [-1, 21, 5],
    "response_format": OF_TEXT["response_format"],
    "tools": [5, {}, [5], [{}], [{"type": "function"}], [{"type": "x", "function": {"name": "f"}}],
              [{"type": "function", "function": {"name": ""}}], [{"type": "function", "function": {"name": 5}}],
              [{"type": "function", "function": {"name": "f", "parameters": 5}}],
              [{"type": "function", "function": {"name": "f"}}] * 2],
    "tool_choice": [5, "x", "required", {"type": "function"}, {"type": "function", "function": {"name": "f"}}, []],
    "parallel_tool_calls": ["x"],
    "functions": [5, [5], [{"name": ""}]],
    "function_call": [5, "x", {"name": "f"}],
    "chat_template_kwargs": [5, [], {"messages": []}, {"tools": 1}, {"temperature": 1}, {"llm": 1},
                             {"behind": "x"}, {"handler": 1}],
    "reasoning_format": [5, "x"],
    "reasoning_effort": [5, "x"],
    "reasoning_budget_tokens": [-2, "x", 2**40],
    "audio": [{}], "modalities": ["x", ["audio"]], "web_search_options": [{}],
    "stream_options": [5, {"include_usage": "x"}],
}  # fmt: skip
OF_RESPONSE = {
    "input": [None, 5, {}, [], [5], [{}], [{"role": "user", "content": 5}], [{"type": "reasoning"}],
              [{"type": "function_call", "name": "f"}], [{"role": "user", "content": [{"type": "input_image"}]}]],
    "previous_response_id": ["resp_1"],
    "max_output_tokens": [0, -1, "x"],
    "tools": [5, [{"type": "web_search"}], [{"type": "function"}]],
    "tool_choice": ["x", {"type": "function"}, "required"],
    "text": [5, {"format": {"type": "x"}}],
    "instructions": [5],
}  # fmt: skip
RAW = [
    b"", b"null", b"[]", b"5", b'"x"', b"{", b"}", b"{]", b"\x00", b"\xff\xfe", b"{'a': 1}", b'{"prompt": "a",}',
    b'{"prompt": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": -NaN}',
    b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "a", "n": ' + b"1" * 10_000 + b"}", b"[" * 100_000,
    b'{"prompt": ' * 1000, b'{"a": ' * 65 + b"1" + b"}" * 65, b'{"prompt": "\\ud800"}', b'{"prompt": "\x01"}',
    b'{"\\ud800": 1, "prompt": "a"}', b"x" * 1000, b'{"prompt": "a"} {}', "{\"prompt\": \"ä\"}".encode("latin-1"),
]  # fmt: skip


def hostile(n):
    """n bodies, each with its path: raw ones, and good ones with one or two fields that cannot be."""
    choose = random.Random(18)
    fields = {CHAT: {**WRONG, **OF_CHAT}, TEXT: {**WRONG, **OF_TEXT}, "/v1/responses": {
        **{name: values for name, values in WRONG.items() if name != "records"}, **OF_RESPONSE}}  # fmt: skip
    singles = [(path, name, value) for path, own in fields.items() for name, values in own.items() for value in values]
    out = [(choose.choice(list(GOOD)), raw) for raw in RAW]
    out += [(path, json.dumps({**GOOD[path], name: value}).encode()) for path, name, value in singles]
    while len(out) < n:
        path = choose.choice(list(GOOD))
        names = choose.sample(sorted(fields[path]), 2)
        out.append((path, json.dumps({**GOOD[path], **{m: choose.choice(fields[path][m]) for m in names}}).encode()))
    return out[: max(n, len(out))]


def test_hostile_bodies(server):
    bodies = hostile(N_BODIES)
    assert len(bodies) >= N_BODIES
    wrong = []
    for path, body in bodies:
        response = server.http.post(path, content=body)
        error = response.json().get("error", {})
        if not 400 <= response.status_code < 500 or not error.get("message") or error.get("type") is None:
            wrong.append((path, body[:120], response.status_code, response.text[:200]))
    assert not wrong
    assert server.post(TEXT, **GOOD[TEXT]).status_code == 200


@pytest.mark.parametrize(
    "path, fields, named",
    [
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "web_search"),
        ("/v1/responses", {"tools": [{"type": "mcp", "server_label": "a", "server_url": "b"}]}, "mcp"),
        ("/v1/responses", {"tool_choice": {"type": "file_search"}}, "file_search"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "custom"),
        (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "allowed_tools"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ("/v1/messages/count_tokens", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ],
)
def test_what_is_not_served_is_named(server, path, fields, named):
    body = {**GOOD.get(path, {"messages": MESSAGES, "max_tokens": 1}), **fields}
    error = server.post(path, **body)
    assert error.status_code == 400 and repr(named) in error.json()["error"]["message"], error.text


def test_a_choice_of_tools_that_is_an_object(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    counts = [
        server.post(f"{CHAT}/input_tokens", messages=MESSAGES, tools=tools, tool_choice=choice).json()["input_tokens"]
        for choice in ("auto", {"type": "auto"}, "none", {"type": "none"})
    ]
    assert counts[0] == counts[1] > counts[2] == counts[3]
    flat = [{"type": "function", "name": "f"}]
    got = server.post("/v1/responses", input="Hi", max_output_tokens=1, tools=flat, tool_choice={"type": "none"})
    assert got.json()["usage"]["input_tokens"] == counts[2]


def test_too_many_prompts_are_not_read(server, monkeypatch):
    monkeypatch.setattr(server.service.model, "tokenize", None)
    error = server.post(TEXT, prompt=["a"] * 100, n=2)
    assert error.status_code == 400 and "asks for 200 answers" in error.json()["error"]["message"]
    assert server.post(TEXT, prompt=["a"] * (2**16 + 1)).status_code == 400


def test_large_requests_are_read_beside_the_event_loop(server, monkeypatch):
    threads = []

    def noting(*args):
        threads.append(threading.current_thread().name)
        return parse(*args)

    monkeypatch.setattr("pyfly_cpp.serve.body.parse", noting)
    for prompt in ("Hi", [1] * 3000):
        server.post(TEXT, prompt=prompt, max_tokens=1)
    assert threads[0] != threads[1] and threads[1].startswith("asyncio_")


SCHEMA = {"enum": ["\ud800"]}


@pytest.mark.parametrize("path", list(GOOD))
def test_half_of_a_surrogate_pair_anywhere(server, path):
    tool = {"type": "function", "name": "f", "function": {"name": "f", "parameters": SCHEMA}, "parameters": SCHEMA}
    for more in (
        {"tools": [tool]},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"\udfff": 1},
    ):
        error = server.http.post(path, content=json.dumps({**GOOD[path], **more}))
        assert error.status_code == 400 and "surrogate" in error.json()["error"]["message"]
    whole = {"user": "\U0001f600", "metadata": "\\ud800"}  # a pair, and a backslash with letters behind it
    assert server.http.post(path, content=json.dumps({**GOOD[path], **whole})).status_code == 200


def test_what_is_ignored(server):
    assert server.post(TEXT, **GOOD[TEXT], unknown={"x": [1]}, metadata=5).status_code == 200
    known = {name for own in (WRONG, OF_TEXT, OF_CHAT, OF_RESPONSE) for name in own}
    for path, model in ((CHAT, ChatRequest), (TEXT, CompletionRequest), ("/v1/responses", ResponseRequest)):
        others = dict.fromkeys(known - model.model_fields.keys(), "x")  # fields of other routes
        got = server.post(path, **GOOD[path], **others)
        assert got.status_code == 200, got.text
        assert set(got.headers["X-Pyfly-Ignored"].split(", ")) == others.keys()
    nulls = {name: None for name in {**WRONG, **OF_TEXT} if name not in ("prompt", "max_tokens")}
    assert server.post(TEXT, **GOOD[TEXT], **nulls).status_code == 200
    nulls = {name: None for name in {**WRONG, **OF_CHAT} if name not in ("messages", "max_tokens")}
    assert server.post(CHAT, **GOOD[CHAT], **nulls).status_code == 200
    assert server.post(TEXT, **{**GOOD[TEXT], "max_tokens": 1.0, "stop": ["", "\n"]}).status_code == 200


@pytest.mark.parametrize(
    "path, fields",
    [
        (TEXT, {"logprobs": 1.0, "n": 1.0}),
        (CHAT, {"logprobs": True, "top_logprobs": 1.0, "n": 1.0, "max_completion_tokens": 2.0}),
        (CHAT, {"reasoning_budget_tokens": 1.0}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2.0, "thinking_budget_tokens": 1.0}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2.0,
                          "thinking": {"type": "enabled", "budget_tokens": 1.0}}),
        ("/completion", {"prompt": "Hi", "n_predict": 2.0, "n_probs": 1.0}),
    ],
)  # fmt: skip
def test_whole_numbers_may_have_a_point(server, path, fields):
    more = {"top_k": 2.0, "seed": 1.0, "draft_max": 1.0, "mirostat_mode": 0.0}
    body = {**GOOD.get(path, {}), **fields, **({} if path == "/v1/messages" else more)}
    response = server.post(path, **body)
    assert response.status_code == 200, response.text


def test_keys_that_are_unknown_are_not_read(server):
    """A choice of one protocol with the key of another."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    body = {"tools": [tool], "tool_choice": {"type": "function", "name": "add", "function": None}, "functions": 1}
    assert server.post("/v1/responses", **body, input="Hi", max_output_tokens=2).status_code == 200
    body = {"functions": [{"name": "add"}], "function_call": {"name": "add", "function": 1}}
    assert server.post(CHAT, **body, messages=MESSAGES, max_tokens=2).status_code == 200


def test_bodies_that_are_too_large(server):
    most = server.service.settings.limits.max_body
    response = server.http.post(TEXT, content=b'{"prompt": "' + b"x" * most + b'"}')
    assert response.status_code == 413 and "send less" in response.json()["error"]["message"]

    def endless():
        for _ in range(2 * most // 2**16):
            yield b" " * 2**16

    assert server.http.post(TEXT, content=endless()).status_code == 413


@pytest.mark.parametrize("path, method, status", [
    ("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405), ("/v1/models", "POST", 405), ("/../etc", "GET", 404),
])  # fmt: skip
def test_paths(server, path, method, status):
    response = server.http.request(method, path)
    assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path, method", [("/api/tags", "GET"), ("/api/chat", "POST")])
def test_clients_of_ollama_are_told_what_to_do(server, path, method):
    response = server.http.request(method, path)
    error = response.json()["error"]
    assert response.status_code == 404 and "not Ollama's" in error and error.endswith(f", {server.url}/v1.")


@pytest.mark.parametrize(
    "header",
    [
        "gate",
        "gate=",
        "gate=x",
        "draft-max=-1",
        "draft-max=x",
        "speculative=no",
        "unknown=1",
        "window=x",
        "gate=stochastic; window=agree:3",
        "gate=" + "x" * 300,
    ],
)
def test_headers(server, header):
    response = server.http.post(TEXT, json=GOOD[TEXT], headers={"X-Pyfly": header})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "x" a a a a a a a a a a a a\na ::= b? b? b? b? b? b? b? b?\nb ::= [a-z]* [a-z]* [a-z]* [a-z]*',
        'root ::= "a"{5000,}',
        "root ::= " + "(" * 70_000,
        f'root ::= "a" {" ".join([chr(34) + "x" * 25 + chr(34) + "{2000}"] * 500)}',
    ],
)
def test_grammars_that_would_hold_up_the_others(server, grammar, monkeypatch):
    monkeypatch.setattr(server.service.grammars, "_seconds", 1.0)
    response = server.post(TEXT, prompt="Hi", grammar=grammar)
    assert response.status_code == 400 and response.json()["error"]["param"] == "grammar"
    assert server.post(TEXT, prompt="Hi", grammar='root ::= "yes"').json()["choices"][0]["text"] == "yes"


def test_a_refusal_that_is_remembered_keeps_no_request(server, monkeypatch):
    seen = []

    async def compile_noting(constraint, whose, compiles=server.service.grammars.compile):
        seen.append(weakref.ref(asyncio.current_task()))
        return await compiles(constraint, whose)

    monkeypatch.setattr(server.service.grammars, "compile", compile_noting)
    for _ in range(3):
        assert server.post(TEXT, prompt="Hi", grammar="root ::= undefined").status_code == 400
    gc.collect()
    assert len(seen) == 3 and not [task for task in seen[:2] if task() is not None]


@pytest.mark.parametrize(
    "bytes_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_what_is_no_http(server, bytes_):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.settimeout(0.5)
        try:
            client.sendall(bytes_)
            answer = client.recv(100)
        except OSError:  # closed, or it waits for the rest
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert server.http.get("/health").status_code == 200
