"""benchmarks/prompts/: prompts of what people do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import task_prompts  # noqa: E402

from pyfly_cpp import FlyLlama  # noqa: E402
from pyfly_cpp.llama.prompting import render_chat  # noqa: E402
from pyfly_cpp.machine.rows import DataError  # noqa: E402

PROMPTS = [prompt for kind in task_prompts.KINDS for prompt in task_prompts.read_kind(kind)]


def test_every_file_is_of_one_kind():
    assert sorted(task_prompts.KINDS) == sorted(path.stem for path in task_prompts.FOLDER.glob("*.jsonl"))


def test_half_of_each_kind_is_held_out():
    assert len(PROMPTS) >= 72 and len({prompt.id for prompt in PROMPTS}) == len(PROMPTS)
    for kind in task_prompts.KINDS:
        held_out = [prompt.held_out for prompt in task_prompts.read_kind(kind)]
        assert held_out == [i % 2 == 0 for i in range(len(held_out))]


def test_conversations_end_with_what_is_to_be_answered():
    for prompt in PROMPTS:
        assert prompt.messages[-1]["role"] in ("user", "tool") and "{document}" not in prompt.messages[-1]["content"]
    for prompt in task_prompts.read_kind("chat"):
        assert sum(message["role"] == "user" for message in prompt.messages) == 6
    for prompt in task_prompts.read_kind("agent"):
        known = {tool["function"]["name"] for tool in prompt.tools}
        calls = [call for message in prompt.messages for call in message.get("tool_calls", ())]
        assert calls and {call["function"]["name"] for call in calls} <= known
        assert all(isinstance(call["function"]["arguments"], dict) for call in calls)


def test_a_model_takes_them(tiny_target):
    llm = FlyLlama(tiny_target, n_ctx=64, verbose=False)
    for prompt in PROMPTS:
        assert render_chat(llm, prompt.messages, tools=prompt.tools).tokens, prompt.id


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"id": "a", "prompt": "Hi"}, "held_out"),
        ({"id": "a", "prompt": "{document}", "document": "nowhere", "held_out": True}, "nowhere"),
        ({"id": "a", "held_out": True}, "prompt"),
    ],
)
def test_bad_rows_are_named(row, named, tmp_path, monkeypatch):
    monkeypatch.setattr(task_prompts, "FOLDER", tmp_path)
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(task_prompts, "documents", dict)
    with pytest.raises(DataError, match=f"line 1.*{named}"):
        task_prompts.read_kind("chat")


@pytest.mark.model_1b5
@pytest.mark.parametrize(("kind", "n"), [("summary-2k", 2000), ("summary-8k", 8000)])
def test_documents_have_the_lengths_of_their_names(kind, n, model_1b5):
    llm = FlyLlama(model_1b5, n_ctx=64, verbose=False)
    for prompt in task_prompts.read_kind(kind):
        assert 0.8 * n < len(render_chat(llm, prompt.messages).tokens) < 1.15 * n, prompt.id
