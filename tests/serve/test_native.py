"""What clients of llama.cpp's server ask for besides OpenAI's protocol."""

from __future__ import annotations

import pytest
from serving import running

from pyfly_cpp.serve.templates import built_in

PROMPT = "Tom has 3 apples."
MESSAGES = [{"role": "user", "content": "How many apples?"}]


def test_a_completion_and_its_stream(server):
    whole = server.post("/completion", prompt=PROMPT, n_predict=8, return_tokens=True).json()
    events = server.events("/completion", prompt=PROMPT, n_predict=8)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events[:-1] for token in event["tokens"]] == whole["tokens"]
    assert whole["stop"] and events[-1]["stop"] and not events[0]["stop"]
    assert (
        whole["stop_type"] == "limit"
        and whole["tokens_predicted"] == 8
        and whole["generation_settings"]["n_predict"] == 8
    )


def test_timings_and_cached_tokens(server):
    text = "Anna buys 12 pencils and 7 pens on Monday. " * 3
    first, again = (server.post("/v1/completions", prompt=text, max_tokens=4).json() for _ in range(2))
    n = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["timings"]["cache_n"] == n - 1
    assert first["timings"]["cache_n"] + first["timings"]["prompt_n"] == n
    assert first["timings"]["predicted_n"] == 4
    assert 0 <= first["timings"]["draft_n_accepted"] <= first["timings"]["draft_n"]


def test_progress(server):
    body = {"messages": [{"role": "user", "content": "nine red hats " * 40}], "max_tokens": 2}
    told = [event["prompt_progress"] for event in server.events("/v1/chat/completions", **body, return_progress=True)
            if event != "[DONE]" and "prompt_progress" in event]  # fmt: skip
    assert len(told) == len({event["processed"] for event in told})
    assert told[0]["processed"] == told[0]["cache"] and told[-1]["processed"] == told[-1]["total"]


def test_prompts_of_texts_and_tokens(server):
    ids = server.post("/tokenize", content=PROMPT).json()["tokens"]
    assert server.post("/detokenize", tokens=ids).json()["content"] == PROMPT
    texts = [server.post("/completion", prompt=prompt, n_predict=6).json()["content"]
             for prompt in (PROMPT, ids, {"prompt_string": PROMPT})]  # fmt: skip
    assert len(set(texts)) == 1
    assert server.post("/completion", prompt=[*ids, " Then", 5], n_predict=2).json()["tokens_evaluated"] > len(ids) + 1
    assert [one["index"] for one in server.post("/completion", prompt=[PROMPT, ids], n_predict=2).json()] == [0, 1]


def test_logit_bias_in_its_forms(server):
    (token, *_) = server.post("/completion", prompt=PROMPT, n_predict=1, return_tokens=True).json()["tokens"]
    piece = server.post("/detokenize", tokens=[token]).json()["content"]
    for bias in ({str(token): -100}, [[token, False]], [[token, -100]], {piece: -100}):
        got = server.post("/completion", prompt=PROMPT, n_predict=1, logit_bias=bias, return_tokens=True).json()
        assert got["tokens"] != [token]


def test_an_answer_is_continued(server):
    asked = [*MESSAGES, {"role": "assistant", "content": "There are"}]
    assert server.post("/apply-template", messages=asked).json()["prompt"].endswith("assistant\nThere are")
    anew = server.post("/apply-template", messages=asked, continue_final_message=False).json()["prompt"]
    assert anew.endswith("assistant\n")
    both = server.post("/apply-template", messages=asked, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


@pytest.mark.parametrize(
    "template, prompt", [("command-r", "<|CHATBOT_TOKEN|>"), ("{{ messages|length }} so far", "1 so far")]
)
def test_another_template(batch, template, prompt):
    with running(batch, chat_template=template) as server:
        assert server.post("/apply-template", messages=MESSAGES).json()["prompt"].endswith(prompt)


def test_names_and_seed(batch):
    assert "command-r" in built_in()
    with running(batch, aliases=("other",), tags=("small",), seed=7) as server:
        (model,) = server.http.get("/models").json()["data"]
        assert model["aliases"][1] == "other" and model["tags"] == ["small"]
        assert server.http.get("/v1/models/other").status_code == 200
        texts = [server.post("/completion", prompt=PROMPT, n_predict=8, temperature=3).json()["content"] for _ in "ab"]
        assert texts[0] == texts[1]
        assert server.http.get("/props").json()["default_generation_settings"]["params"]["seed"] == 7
        assert len(server.http.get("/slots").json()) == batch.n_parallel
