"""/v1/completions, against the same model without a server."""

from __future__ import annotations

import json

import numpy as np
import pytest
from serving import no_end

PATH = "/v1/completions"
PROMPT = "Natalia sold clips to 48 of her friends in April."
PROMPTS = [PROMPT, "Tom has 3 apples and 4 pears.", "def add(a, b):"]


def joined(events):
    """What a stream says of each choice: its text, and why it ended."""
    texts, ends = {}, {}
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
    return texts, ends


def test_as_without_a_server(server, alone):
    expected = alone.create_completion(PROMPT, max_tokens=30, temperature=0)
    got = server.post(PATH, prompt=PROMPT, max_tokens=30).json()
    assert got["choices"][0]["text"] == expected["choices"][0]["text"]
    assert got["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert {name: got["usage"][name] for name in expected["usage"]} == expected["usage"]
    assert (got["object"], got["model"], got["system_fingerprint"][-6:]) == ("text_completion", "tiny", "-exact")


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"stop": [".", "\n"], "max_tokens": 40},
        {"stop": "friends in", "max_tokens": 40},
        {"echo": True, "logprobs": 2, "max_tokens": 6},
        {"temperature": 1.1, "seed": 7, "top_k": 0, "top_p": 0.8, "min_p": 0, "presence_penalty": 0.5},
        {"temperature": 1, "seed": 1, "mirostat_mode": 2, "mirostat_tau": 4, "mirostat_eta": 0.1},
    ],
)
def test_a_stream_is_the_same_answer(server, options):
    body = {"prompt": PROMPTS, "max_tokens": 20, **options}
    whole = server.post(PATH, **body).json()
    texts, ends = joined(server.events(PATH, **body))
    assert [texts[c["index"]] for c in whole["choices"]] == [c["text"] for c in whole["choices"]]
    assert [ends[c["index"]] for c in whole["choices"]] == [c["finish_reason"] for c in whole["choices"]]
    assert len(texts) == 3 * options.get("n", 1)
    for stop in [options["stop"]] if isinstance(options.get("stop"), str) else options.get("stop", []):
        assert not any(stop in text for text in texts.values())


def test_seeds(server):
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1.0}

    def texts(**options):
        return [choice["text"] for choice in server.post(PATH, **body, **options).json()["choices"]]

    assert texts(seed=3) == texts(seed=3) == texts(seed=3, speculative=False)
    assert len(set(texts(seed=3, n=4))) > 1
    assert texts(seed=3, n=2)[1] == texts(seed=4)[0]
    assert texts(seed=-(2**63)) == texts(seed=-(2**63))
    assert texts(seed=-1, n=3) != texts(seed=-1, n=3)


@pytest.mark.alike
def test_log_probabilities(server, alone):
    expected = alone.create_completion(PROMPT, max_tokens=8, temperature=0, logprobs=3, echo=True)["choices"][0]
    got = server.post(PATH, prompt=PROMPT, max_tokens=8, logprobs=3, echo=True).json()["choices"][0]
    assert got["text"] == expected["text"] and got["text"].startswith(PROMPT)
    assert got["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    assert got["logprobs"]["text_offset"] == expected["logprobs"]["text_offset"]
    own, theirs = (np.array(one["logprobs"]["token_logprobs"][1:]) for one in (got, expected))
    np.testing.assert_allclose(own, theirs, atol=1e-3)
    streamed = server.events(PATH, prompt=PROMPT, max_tokens=8, logprobs=3, echo=True)[:-1]
    tokens = [token for event in streamed for token in event["choices"][0]["logprobs"]["tokens"]]
    assert tokens == got["logprobs"]["tokens"]
    # What lm-eval asks for: how probable a text is, and nothing behind it.
    scored = server.post(PATH, prompt=alone.tokenize(PROMPT.encode()), max_tokens=0, logprobs=1, echo=True).json()
    n = len(alone.tokenize(PROMPT.encode()))
    assert (scored["usage"]["prompt_tokens"], scored["usage"]["completion_tokens"]) == (n, 0)
    np.testing.assert_allclose(scored["choices"][0]["logprobs"]["token_logprobs"][1:], own[: n - 1], atol=1e-3)


def test_prompts_of_all_forms(server, alone):
    ids = [alone.tokenize(prompt.encode()) for prompt in PROMPTS]
    texts = [server.post(PATH, prompt=prompt, max_tokens=8).json()["choices"][0]["text"] for prompt in PROMPTS]
    for prompt in (PROMPTS, ids):
        got = server.post(PATH, prompt=prompt, max_tokens=8).json()
        assert [choice["text"] for choice in got["choices"]] == texts
        assert got["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.post(PATH, prompt=ids[0], max_tokens=8).json()["choices"][0]["text"] == texts[0]
    assert server.post(PATH, prompt="", max_tokens=4).status_code == 200


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_of_prompts_of_several_forms(server, echo):
    """Each choice is told as if its prompt were alone."""
    bos = server.service.model.beginning()
    prompts = [PROMPT, [*bos, 300, 301], [PROMPT, 300]]
    options = {"max_tokens": 2, "logprobs": 0, "echo": echo}
    alone = [server.post(PATH, prompt=prompt, **options).json()["choices"][0] for prompt in prompts]
    assert [len(one["logprobs"]["tokens"]) for one in alone[1:2]] == [2 + 3 * echo]
    assert not echo or alone[2]["logprobs"]["tokens"][0] != server.service.model.text(bos, special=True)
    for order in ([0, 1, 2], [1, 2, 0]):
        got = server.post(PATH, prompt=[prompts[i] for i in order], **options).json()["choices"]
        for one, i in zip(got, order):
            assert one["logprobs"]["text_offset"] == alone[i]["logprobs"]["text_offset"]
            assert one["logprobs"]["tokens"] == alone[i]["logprobs"]["tokens"]


def test_logit_bias_and_grammar(server, alone):
    token = alone.tokenize(b" the", add_bos=False)[0]
    got = server.post(PATH, prompt=PROMPT, max_tokens=3, logit_bias={str(token): 100}).json()["choices"][0]
    assert got["text"] == alone.detokenize([token] * 3).decode()
    for options in ({}, {"gate": "margin:3", "window": "reconverge:4"}):
        got = server.post(PATH, prompt=PROMPT, max_tokens=9, grammar='root ::= ("yes" | "no") [0-9]+', **options)
        assert got.json()["choices"][0]["text"].strip("0123456789") in ("yes", "no")
    got = server.post(PATH, prompt="A:", max_tokens=100, response_format={"type": "json_object"}, temperature=1, seed=1)
    assert got.json()["choices"][0]["text"].startswith("{")


def test_gates_of_a_request(server):
    def fingerprint(headers=None, **body):
        got = server.http.post(PATH, json={"prompt": PROMPT, "max_tokens": 4, **body}, headers=headers).json()
        return got["system_fingerprint"].split("-", 3)[3]

    assert fingerprint() == "exact"
    assert fingerprint(gate="margin:0.3") == "margin:0.3"
    assert fingerprint(gate="margin:0.3", window="agree:3") == "margin:0.3-agree:3"
    assert fingerprint(speculative=False) == "plain"
    assert fingerprint({"X-Pyfly": "gate=entropy:0.4; window=agree:2; draft-max=3"}) == "entropy:0.4-agree:2"
    assert fingerprint({"X-Pyfly": "speculative=false"}) == "plain"
    assert fingerprint({"X-Pyfly": "gate=entropy:0.4"}, gate="margin:1") == "margin:1"


def test_how_tokens_came(server):
    body = {"prompt": PROMPT, "max_tokens": 24, "gate": "margin:2", "window": "reconverge:2", "records": True}
    choice = server.post(PATH, **body).json()["choices"][0]
    tokens, stats = choice["pyfly"]["tokens"], choice["pyfly"]["stats"]
    assert "".join(token["text"] for token in tokens) == choice["text"]
    assert {token["origin"] for token in tokens} >= {"matched", "target"}
    assert stats["committed"] >= len(tokens) and stats["mean_accepted"] > 1
    assert all(token["entropy"] is None or token["entropy"] >= 0 for token in tokens)
    streamed = [event["choices"][0] for event in server.events(PATH, **body)[:-1]]
    assert [token["text"] for one in streamed for token in one["pyfly"]["tokens"]] == [t["text"] for t in tokens]
    assert "stats" in streamed[-1]["pyfly"]


def test_an_answer_that_repeats_itself_is_ended_if_that_is_asked(server):
    body = {"prompt": PROMPT, "max_tokens": 140, "logit_bias": {"300": 100}, "records": True}
    for fields, n, cause in (({}, 140, "length"), ({"stop_loops": True}, 128, "loop")):
        got = server.post(PATH, **body, **fields).json()
        (choice,) = got["choices"]
        assert (got["usage"]["completion_tokens"], choice["finish_reason"]) == (n, "length")
        assert choice["pyfly"]["cause"] == cause
    native = server.post("/completion", **body, stop_loops=True).json()
    assert (native["stop_type"], native["tokens_predicted"]) == ("limit", 128)
    answer = {"input": "Hi", "max_output_tokens": 140, "logit_bias": {"300": 100}, "stop_loops": True}
    response = server.post("/v1/responses", **answer).json()
    assert response["status"] == "incomplete" and response["incomplete_details"]["reason"] == "max_output_tokens"


def test_usage_in_streams(server):
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": 7, "temperature": 1, "seed": 1}
    events = server.events(PATH, **body, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["choices"] == []
    whole = server.post(PATH, **body).json()["usage"]
    assert {**events[-2]["usage"], "prompt_tokens_details": whole["prompt_tokens_details"]} == whole
    assert events[-1] == "[DONE]"


def test_the_context_is_full(server, batch):
    got = server.post(PATH, prompt="one " * 200, max_tokens=4000, logit_bias=no_end(batch)).json()
    assert got["usage"]["total_tokens"] == batch.n_ctx
    assert got["choices"][0]["finish_reason"] == "length"
    for prompt in ("one " * 1000, "x" * 200_000):
        error = server.post(PATH, prompt=prompt)
        assert error.status_code == 400 and error.json()["error"]["code"] == "context_length_exceeded"


def test_the_tokenizer(server, alone):
    tokens = server.post("/tokenize", prompt=PROMPT, add_special_tokens=False).json()["tokens"]
    assert tokens == alone.tokenize(PROMPT.encode(), add_bos=False)
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == PROMPT
    info = server.http.get("/tokenizer_info").json()
    assert "<|im_start|>" in info["chat_template"] and info["eos_token"]


def test_fill_in(server):
    error = server.post(PATH, prompt="def add(", suffix="return a + b")
    assert error.status_code == 400 and error.json()["error"]["param"] == "suffix"


def test_json_is_utf8(server):
    response = server.http.post(PATH, content=json.dumps({"prompt": "Ünïcödé €😀", "max_tokens": 1, "echo": True}))
    assert response.json()["choices"][0]["text"].startswith("Ünïcödé €😀")
