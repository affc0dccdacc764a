"""Thoughts of an answer: told apart, switched off, ended by a budget."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf_edit import edit_gguf
from serving import EXACT, no_end, running

from pyfly_cpp import FlyBatch
from pyfly_cpp.engine.output import Piece, Token
from pyfly_cpp.serve.chat import chat_completion
from pyfly_cpp.serve.requests import ChatRequest
from pyfly_cpp.serve.thoughts import Budget, ThoughtReader, opened_by

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "closing, answer, thoughts, text",
    [
        (None, "Just <think> text", "", "Just <think> text"),
        (None, "<think>\nSo,\n\nso.\n</think>\n\nIt is.", "So,\n\nso.", "It is."),
        (None, "\n<think>\n\n</think>\n\nIt", "", "It"),
        (None, "[THINK]a < b</think>[/THINK]c", "a < b</think>", "c"),
        (None, "<thin ice", "", "<thin ice"),
        (None, "<think>So </thin", "So </thin", ""),
        ("</think>", "\nSo.\n</think>\n\n<think> it", "So.", "<think> it"),
        ("</think>", "So", "So", ""),
        (None, "", "", ""),
        (None, "\n\nIt is.", "", "\n\nIt is."),
    ],
)
def test_thoughts_are_told_apart(closing, answer, thoughts, text):
    for size in (1, 3, 100):
        reader = ThoughtReader(closing)
        parts = [reader.add(answer[i : i + size]) for i in range(0, len(answer), size)] + [reader.end()]
        assert tuple(map("".join, zip(*parts))) == (thoughts, text)


def test_blanks_behind_thoughts_that_the_prompt_has_ended_are_no_text():
    reader = ThoughtReader(None, is_behind=True)
    parts = [*map(reader.add, ("\n", "\nIt", " is.\n")), reader.end()]
    assert parts == [("", ""), ("", "It"), ("", " is.\n"), ("", "")]


def test_blanks_within_thoughts_that_are_continued_stay():
    reader = ThoughtReader("</think>", is_within=True)
    assert [reader.add(" two.\n"), reader.add("</think>\n"), reader.add("It")] == [(" two.", ""), ("", ""), ("", "It")]


def test_prompts_that_begin_thoughts():
    assert opened_by("<|assistant|><think>\n") == "</think>"
    assert opened_by("<think>\n\n</think>\n\n") is None is opened_by("Hi")


PIECES = ["so ", "<think>", "<thi", "nk>\n", "</", "think", ">", "</think>", "</think>\n\n", "it", "\n", ">\n\n",
          "</th", "ink>", b"\xe2", b"\x82", b"\xac", "[THINK]", "[/THINK]"]  # fmt: skip
PIECES = [piece if isinstance(piece, bytes) else piece.encode() for piece in PIECES]
CLOSINGS = {"</think>": [4, 5, 6], "think>": [5, 6], "ink>": [13], ">": [6], "[/THINK]": [18]}


def budget(n, closing=None):
    return Budget(2, n, ThoughtReader(closing), PIECES.__getitem__, CLOSINGS)


def forced(processor, written):
    """The only token that may follow; None: any."""
    row = processor(np.array([9, 9, *written], np.intc), np.zeros(len(PIECES), np.single))
    return int(np.flatnonzero(np.isfinite(row))[0]) if np.isinf(row).any() else None


def continued(processor, tokens, n=20):
    """An answer of these tokens, where nothing is forced, and the text that it is."""
    written, wanted = [], iter(tokens)
    while len(written) < n:
        one = forced(processor, written)
        one = next(wanted, None) if one is None else one
        if one is None:
            break
        written.append(one)
    return b"".join(PIECES[token] for token in written).decode("utf-8", "ignore")


@pytest.mark.parametrize(
    "closing, n, tokens, text",
    [
        # The thoughts end by themselves, in whatever tokens: nothing is forced.
        ("</think>", 3, [0, 7, 9, 9, 9], "so </think>ititit"),
        ("</think>", 3, [0, 8, 9, 9, 9], "so </think>\n\nititit"),
        ("</think>", 4, [0, 4, 5, 11, 9, 9], "so </think>\n\nitit"),
        (None, 4, [1, 0, 12, 13, 9, 9, 9], "<think>so </think>ititit"),
        # They are opened by themselves, in whatever tokens; those that open them are not counted.
        (None, 2, [1, 0, 0, 9], "<think>so so </think>it"),
        (None, 2, [2, 3, 0, 0, 9], "<think>\nso so </think>it"),
        (None, 1, [10, 2, 3, 0, 0, 9], "\n<think>\nso </think>so it"),
        (None, 2, [17, 0, 0, 9], "[THINK]so so [/THINK]it"),
        (None, 0, [2, 3, 9], "<think>\n</think>it"),
        # A marker that the model has begun is completed, not written again.
        ("</think>", 2, [0, 4, 9], "so </think>it"),
        ("</think>", 2, [0, 12, 9], "so </think>it"),
        ("</think>", 3, [0, 4, 5, 9], "so </think>it"),
        ("</think>", 2, [4, 0, 9], "</so </think>it"),
        # A character is completed; bytes that are none do not hold it up.
        ("</think>", 2, [0, 14, 15, 16, 9], "so \u20ac</think>it"),
        ("</think>", 2, [0, 14, 14, 14, 14, 14, 9], "so </think>it"),
        # Nothing is forced in an answer without thoughts, nor behind them.
        (None, 1, [9, 1, 0, 0, 0], "it<think>so so so "),
        (None, 2, [1, 7, 1, 0, 0, 0], "<think></think><think>so so so "),
    ],
)
def test_a_budget_ends_thoughts_and_nothing_else(closing, n, tokens, text):
    assert continued(budget(n, closing), tokens) == text


def test_a_budget_follows_drafts_that_are_taken_back():
    """Whatever histories it has seen, it is as if it had seen each alone."""
    choose = np.random.default_rng(4)
    processor, written = budget(3), []
    for _ in range(3000):
        if choose.random() < 0.4:
            written = written[: choose.integers(len(written) + 1)]
        if len(written) < 14:
            one = forced(budget(3), written)
            written = [*written, int(choose.integers(len(PIECES))) if one is None or choose.random() < 0.3 else one]
        assert forced(processor, written) == forced(budget(3), written), written


@pytest.fixture(scope="module")
def thinking(tiny_target_f32, tmp_path_factory):
    """A server with a template that begins thoughts unless it is told not to."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
        "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    )
    path = edit_gguf(
        tiny_target_f32, tmp_path_factory.mktemp("think") / "think.gguf", {"tokenizer.chat_template": template}
    )
    with FlyBatch(str(path), 2, **EXACT) as batch, running(batch) as server:
        yield server


def message(server, **fields):
    return server.post(PATH, messages=MESSAGES, **fields).json()["choices"][0]["message"]


def test_thoughts_of_an_answer(thinking):
    on = no_end(thinking.service.model.batch)
    body = {"max_tokens": 40, "reasoning_budget_tokens": 12, "logit_bias": on}
    whole = message(thinking, **body)
    assert whole["reasoning_content"] and whole["content"]
    deltas = [event["choices"][0]["delta"] for event in thinking.events(PATH, messages=MESSAGES, **body)[:-1]]
    for field in ("reasoning_content", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == whole[field]
    as_it_is = message(thinking, reasoning_format="none", **body)
    assert as_it_is["content"].startswith("<think>\n")
    assert as_it_is["content"].count("</think>") == 1 and "reasoning_content" not in as_it_is
    events = thinking.events(PATH, messages=MESSAGES, reasoning_format="none", **body)[:-1]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == as_it_is["content"]
    without = message(thinking, chat_template_kwargs={"enable_thinking": False}, max_tokens=8, logit_bias=on)
    assert without["content"] and "reasoning_content" not in without
    assert message(thinking, reasoning_effort="none", max_tokens=8, logit_bias=on) == without
    for name in ("messages", "behind", "llm", "handler"):
        taken = thinking.post(PATH, messages=MESSAGES, chat_template_kwargs={name: []})
        assert taken.status_code == 400 and taken.json()["error"]["param"] == "chat_template_kwargs"


def test_thoughts_are_off_for_requests_that_say_nothing_of_them(thinking, tiny_target_f32):
    """Also where the template begins thoughts whatever it is told; what is told of a prompt is what is evaluated."""
    template = thinking.service.model.template
    stubborn = template.replace("enable_thinking is not defined or enable_thinking", "true")
    more = {"max_tokens": 40, "logit_bias": no_end(thinking.service.model.batch)}
    for own, ending in ((template, "assistant: "), (stubborn, "<think>\n</think>")):
        with running(thinking.service.model.batch, reasoning_budget=0, chat_template=own) as off:
            assert "reasoning_content" not in message(off, **more)
            prompt = off.post("/apply-template", messages=MESSAGES).json()["prompt"]
            assert prompt.endswith(ending)
            n = off.post("/v1/chat/completions/input_tokens", messages=MESSAGES).json()["input_tokens"]
            assert n == off.post(PATH, messages=MESSAGES, **more).json()["usage"]["prompt_tokens"]
            for asked in (
                {"reasoning_budget_tokens": -1}, {"thinking_budget_tokens": 9},
                {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"},
            ):  # fmt: skip
                assert message(off, **asked, **more)["reasoning_content"]
    with running(thinking.service.model.batch, reasoning_budget=12) as short:
        assert message(short, **more) == message(thinking, reasoning_budget_tokens=12, **more)


def test_tokens_of_thoughts_are_counted(thinking):
    def n_of(**fields):
        usage = thinking.post(PATH, messages=MESSAGES, **fields).json()["usage"]
        return usage["completion_tokens_details"]["reasoning_tokens"], usage["completion_tokens"]

    on = no_end(thinking.service.model.batch)
    n, n_all = n_of(max_tokens=40, reasoning_budget_tokens=12, logit_bias=on)
    assert 12 < n < n_all == 40, "the marker that ends them is a part of them"
    assert n_of(max_tokens=9, logit_bias=on) == (9, 9)
    assert n_of(max_tokens=9, logit_bias=on, chat_template_kwargs={"enable_thinking": False}) == (0, 9)
    usage = thinking.post("/v1/responses", input="Hi", max_output_tokens=9, logit_bias=on).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 9}


def test_a_budget_with_drafts_and_several_answers(thinking, batch):
    """Drafts run past the place where the budget ends, and are taken back."""
    on = no_end(batch)
    with running(batch, chat_template=thinking.service.model.template) as server:
        for n in (1, 5, 12):
            body = {"messages": MESSAGES, "max_tokens": 32, "reasoning_budget_tokens": n, "logit_bias": on}
            alone = thinking.post(PATH, **body).json()
            together = server.post(PATH, n=3, **body).json()
            assert [choice["message"] for choice in together["choices"]] == [alone["choices"][0]["message"]] * 3
            counts = [one["usage"]["completion_tokens_details"]["reasoning_tokens"] for one in (alone, together)]
            assert counts[1] == 3 * counts[0]
        assert together["timings"]["draft_n"] > 0
        stopped = {**body, "stop": ["</think>"]}
        got = server.post(PATH, **stopped).json()["choices"][0]
        assert got["finish_reason"] == "stop" and not got["message"]["content"]
        assert got["message"]["reasoning_content"] == alone["choices"][0]["message"]["reasoning_content"]


def test_tokens_that_are_held_back_are_counted_each(thinking):
    """A stop string that may begin holds back the end of the thoughts; a token may end them and go on."""
    body = {"messages": MESSAGES, "reasoning_budget_tokens": 12}
    model, settings = thinking.service.model, thinking.service.settings
    texts = ["So", " it", "</thi", "nk>\nIt", " is", "."]
    for cuts in ([1] * 6, [2, 3, 1], [6]):
        chat, tokens = (
            chat_completion(model, settings, ChatRequest(**body), model.decoding),
            [Token(i, text) for i, text in enumerate(texts)],
        )
        for i, n in enumerate(cuts):
            own, tokens = tokens[:n], tokens[n:]
            finish = "stop" if i + 1 == len(cuts) else None
            piece = Piece("".join(token.text for token in own), tuple(own), 6 - len(tokens), finish, finish)
            list(chat.add(0, piece))
        assert chat.usage()["completion_tokens_details"] == {"reasoning_tokens": 4}
        assert chat.whole()["choices"][0]["message"]["reasoning_content"] == "So it"


def test_control_tokens_that_spell_markers(tiny_target_f32, tmp_path_factory):
    """They have no text elsewhere, but thoughts are told apart by it, and ended."""
    tokens = gguf.GGUFReader(tiny_target_f32).fields["tokenizer.ggml.tokens"].contents()
    closing = tokens.index("<|im_start|>")
    tokens[closing] = "</think>"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    path = edit_gguf(
        tiny_target_f32, tmp_path_factory.mktemp("control") / "control.gguf",
        {"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": template},
    )  # fmt: skip
    with FlyBatch(str(path), 2, **EXACT) as batch, running(batch) as server:
        assert server.service.model.marker_tokens == {closing}
        body = {"max_tokens": 20, "reasoning_budget_tokens": 4, "logit_bias": no_end(batch)}
        got = server.post(PATH, messages=MESSAGES, **body).json()
        assert got["choices"][0]["message"]["reasoning_content"] and got["choices"][0]["message"]["content"]
        assert got["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_thoughts_in_the_other_protocols(thinking):
    body = {"max_tokens": 40, "logit_bias": no_end(thinking.service.model.batch)}
    thought = message(thinking, **body)["reasoning_content"]
    response = {"input": "Hi", "max_output_tokens": 40, "logit_bias": body["logit_bias"]}
    (item,) = thinking.post("/v1/responses", **response).json()["output"]
    assert item["type"] == "reasoning" and item["content"][0]["text"] == thought
    events = thinking.events("/v1/responses", **response)
    assert "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta") == thought
    again = [item, {"role": "user", "content": "Hi"}]
    assert thinking.post("/v1/responses", **{**response, "input": again}).json()["output"][0]["content"]
    own = {"messages": MESSAGES, "max_tokens": 12}
    (block,) = thinking.post("/v1/messages", thinking={"type": "enabled", "budget_tokens": 1024}, **own).json()[
        "content"
    ]
    assert block["type"] == "thinking" and thought.startswith(block["thinking"])
    assert thinking.post("/v1/messages", **own).json()["content"][0]["type"] == "text"


@pytest.mark.parametrize("begins", [True, False])
def test_an_answer_is_continued_where_it_broke_off(thinking, begins):
    """Within its thoughts or behind them, whether or not the template begins thoughts."""
    template = thinking.service.model.template
    own = template if begins else template[: template.index("{% if")]
    on = no_end(thinking.service.model.batch)

    def prompt(**message):
        messages = [*MESSAGES, {"role": "assistant", **message}]
        return server.post("/apply-template", messages=messages).json()["prompt"]

    with running(thinking.service.model.batch, chat_template=own) as server:
        begun = server.post("/apply-template", messages=MESSAGES).json()["prompt"]
        opening = "" if begins else "<think>\n"
        assert prompt(content="", reasoning_content="So") == f"{begun}{opening}So"
        assert prompt(content="It", reasoning_content="So.") == f"{begun}{opening}So.\n</think>\n\nIt"
        assert prompt(content="It") == begun + ("\n</think>\n\nIt" if begins else "It")
        broken = {"role": "assistant", "content": "", "reasoning_content": "So it"}
        body = {"messages": [*MESSAGES, broken], "max_tokens": 30, "logit_bias": on}
        got = server.post(PATH, reasoning_budget_tokens=9, **body).json()["choices"][0]["message"]
        assert got["reasoning_content"] and got["content"] and "<think>" not in got["reasoning_content"]
        off = server.post(PATH, chat_template_kwargs={"enable_thinking": False}, **body).json()["choices"][0]["message"]
        assert "reasoning_content" not in off
