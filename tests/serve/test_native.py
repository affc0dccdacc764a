"""What clients of llama.cpp's server ask for besides OpenAI's protocol."""

from __future__ import annotations

import pytest
from gguf_edit import edit_gguf
from serving import EXACT, no_end, running

from pyfly_cpp import FlyBatch
from pyfly_cpp.decoding import EXACT as EXACT_DECODING
from pyfly_cpp.serve.native import Infill
from pyfly_cpp.serve.requests import InfillRequest
from pyfly_cpp.serve.served_model import built_in

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


def test_words_of_llama_cpp_for_mirostat_and_for_any_seed(server):
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 1, "seed": 3, "mirostat_tau": 0.1}
    ours, theirs, without = (
        server.post("/completion", **body, **more).json() for more in ({"mirostat_mode": 2}, {"mirostat": 2}, {})
    )
    assert ours["content"] == theirs["content"] != without["content"]
    assert theirs["generation_settings"]["mirostat"] == 2
    any_seed = server.http.get("/props").json()["default_generation_settings"]["params"]["seed"]
    seeds = {
        server.post("/completion", prompt=PROMPT, n_predict=1, seed=any_seed).json()["generation_settings"]["seed"]
        for _ in range(3)
    }
    assert len(seeds) == 3


def test_temperatures_that_logits_cannot_be_divided_by(server):
    greedy, tiny = (
        server.post("/completion", prompt=PROMPT, n_predict=8, temperature=one).json() for one in (0, 1e-38)
    )
    assert tiny["content"] == greedy["content"]


def test_more_tokens_than_the_context_are_not_written_out(server):
    n_ctx = server.http.get("/props").json()["default_generation_settings"]["n_ctx"]
    assert server.post("/detokenize", tokens=[5] * n_ctx).status_code == 200
    assert server.post("/detokenize", tokens=[5] * (n_ctx + 1)).status_code == 400


def test_timings_and_cached_tokens(server):
    server.until_idle()  # what a test before has left running might take the memory of the first
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
    forms = {str(token): -100}, [[token, False]], [[token, -100]], {piece: -100}, {piece: False}, {str(token): False}
    for bias in forms:
        got = server.post("/completion", prompt=PROMPT, n_predict=1, logit_bias=bias, return_tokens=True).json()
        assert got["tokens"] != [token]


def test_a_prompt_is_read_and_nothing_written(server):
    """As an editor warms the memory up."""
    text = "Anna reads 31 pages on Friday and 12 on Sunday. "
    got = server.post("/completion", prompt=text, n_predict=0).json()
    assert (got["content"], got["tokens_predicted"], got["stop_type"]) == ("", 0, "limit")
    (event,) = server.events("/completion", prompt=text, n_predict=0)
    assert event["stop"] and event["content"] == ""
    again = server.post("/v1/completions", prompt=text, max_tokens=0).json()
    assert again["timings"]["cache_n"] > 8 and again["usage"]["completion_tokens"] == 0
    chat = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=0).json()
    assert chat["usage"]["completion_tokens"] == 0 and chat["choices"][0]["finish_reason"] == "length"
    assert not chat["choices"][0]["message"]["content"]


def test_fields_that_an_answer_lacks_are_left_out(server):
    fields = ["", "x", "timings/x", "content", "generation_settings/n_predict"]
    got = server.post("/completion", prompt=PROMPT, n_predict=1, response_fields=fields).json()
    assert got.keys() == {"content", "generation_settings/n_predict"}
    assert "content" in server.post("/completion", prompt=PROMPT, n_predict=1, response_fields=[]).json()


def test_the_stop_string_and_the_time_of_a_text_that_is_held_back(server, batch):
    text = server.post("/completion", prompt=PROMPT, n_predict=24, logit_bias=no_end(batch)).json()["content"]
    stop = text[: len(text) // 2]
    got = server.post("/completion", prompt=PROMPT, n_predict=24, logit_bias=no_end(batch), stop=[stop, "zz"]).json()
    assert (got["stop_type"], got["stopping_word"], got["content"]) == ("word", stop, "")
    held = {"stop": [text + "x"], "n_predict": 24, "logit_bias": no_end(batch)}
    for timings in (got["timings"], server.post("/completion", prompt=PROMPT, **held).json()["timings"]):
        assert timings["predicted_ms"] > 0.1  # more than between two events of the same end


def test_a_limit_of_the_time_ends_an_answer_with_its_line(server, batch):
    lines = {**no_end(batch), "\n": 6}
    body = {"prompt": PROMPT, "n_predict": 60, "logit_bias": lines}
    text = server.post("/completion", **body).json()["content"]
    assert "\n" in text.strip("\n")
    got = server.post("/completion", **body, t_max_predict_ms=3600000).json()
    assert got["content"] == text
    got = server.post("/completion", **body, t_max_predict_ms=1).json()
    assert text.startswith(got["content"]) and (got["content"] == text or got["content"][-1] == "\n")
    assert got["stop_type"] == "limit"


@pytest.fixture(scope="module")
def filling(tiny_target_f32, tmp_path_factory):
    """A model with tokens around a gap, and before the names of files."""
    names = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
    ids = dict(zip(names, range(1525, 1530)))
    fields = {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    path = edit_gguf(tiny_target_f32, tmp_path_factory.mktemp("fill") / "fill.gguf", fields)
    with FlyBatch(str(path), 1, **EXACT) as batch, running(batch) as server:
        yield server, ids


def prompt_of(server, **body):
    """The tokens before, between and behind the three that stand around a gap."""
    asked = InfillRequest(**{"n_predict": 8, **body})
    answer = Infill(server.service.model, server.service.settings, asked, EXACT_DECODING)
    return list(answer.requests[0].prompt)


@pytest.mark.parametrize(
    "n_extra, n_prefix, n_suffix", [(0, 3, 3), (2, 3, 3), (16, 900, 900), (900, 900, 0), (1, 0, 900)]
)
def test_what_is_around_a_gap_is_cut(filling, n_extra, n_prefix, n_suffix):
    """In llama.cpp's proportions: three quarters for the end of the prefix, one for the beginning of the suffix."""
    server, ids = filling
    model = server.service.model
    prefix, suffix = (" ".join(f"{c}{i}" for i in range(n)) for c, n in (("a", n_prefix), ("b", n_suffix)))
    extra = [{"filename": f"{i}.py", "text": f"z = {i}\n" * 30} for i in range(n_extra)]
    body = {"input_prefix": prefix, "input_suffix": suffix, "prompt": "x =", "input_extra": extra}
    prompt = prompt_of(server, **body)
    rest = prompt[prompt.index(ids["fim_pre"]) + 1 :]
    place = rest.index(ids["fim_suf"])
    begun, behind = rest[:place], rest[place + 1 : -1]
    assert rest[-1] == ids["fim_mid"] and len(prompt) + 8 <= model.batch.n_ctx
    assert f"{prefix}x =".endswith(model.text(begun)) and suffix.startswith(model.text(behind))
    n = model.batch.n_ctx - 8 - 2
    assert len(begun) <= 3 * (n // 4) + 4 and len(behind) <= n // 4
    if n_prefix < 9:
        assert model.text(begun) == f"{prefix}x ="
    if n_prefix > 99:
        assert len(begun) >= 3 * (n // 4)
    if n_suffix > 99:
        assert len(behind) >= n // 4 - 8
    assert server.post("/infill", n_predict=2, **body).status_code == 200


def test_the_ends_of_other_files_fill_the_context(filling, monkeypatch):
    server, ids = filling
    model = server.service.model
    monkeypatch.setattr("pyfly_cpp.serve.native._NEAR", 100)
    extra = [{"filename": f"{i}.py", "text": f"z = {i}\n" * 20} for i in range(16)]
    prompt = prompt_of(server, input_prefix="a", input_suffix="b", input_extra=extra)
    others = prompt[: prompt.index(ids["fim_pre"])]
    assert (
        512 - 100 - 2 * 8 >= len(others) > 350
        and others[-1] != ids["fim_sep"]
        and "15.py\nz = 15" in model.text(others)
    )
    (only,) = ({"filename": "c.py", "text": "z = 3"},)
    prompt = prompt_of(server, input_prefix="a", input_suffix="b", input_extra=[only])
    shown = model.text(prompt[: prompt.index(ids["fim_pre"])])
    assert [prompt.count(ids[name]) for name in ("fim_rep", "fim_sep")] == [1, 2] and "c.py\nz = 3\n" in shown


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


def test_arguments_are_an_object_unless_a_template_takes_texts(batch):
    call = {"function": {"name": "f", "arguments": '{"a": "x"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    each = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ WRITTEN }}{% endfor %}{% endfor %}{% if tools %}"
    )
    for written in ("call.function.arguments.a", "' ' + call.function.arguments"):
        template = f"{each.replace('WRITTEN', written)}{{% endif %}}"
        with running(batch, chat_template=template) as server:
            prompt = server.post("/apply-template", messages=messages).json()["prompt"]
            assert prompt == {"c": "x", "'": ' {"a": "x"}'}[written[0]]


def test_results_of_calls_where_a_template_knows_no_tools(batch):
    """They are the user's, who does not speak twice in a row."""
    calls = [{"id": i, "function": {"name": "f", "arguments": "{}"}} for i in "12"]
    results = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in "12"]
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, *results, *MESSAGES]
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    with running(batch, chat_template=template) as server:
        prompt = server.post("/apply-template", messages=messages).json()["prompt"]
        *_, last = prompt.split("user: ")
        assert prompt.count("user: ") == 2 and "result 1" in last and "result 2" in last
        assert last.endswith(f"{MESSAGES[0]['content']}\n")


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


def test_refusals_stay_in_the_history(server):
    """They are texts of the assistant, as openai's types have them."""
    asked = MESSAGES[0]
    for refused in (
        {"content": [{"type": "refusal", "refusal": "I refuse"}]},
        {"content": None, "refusal": "I refuse"},
    ):
        messages = [asked, {"role": "assistant", **refused}, asked]
        assert "I refuse" in server.post("/apply-template", messages=messages).json()["prompt"]
