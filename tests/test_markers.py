"""Markers of a chat that ordinary tokens write: which are found, and that no loose accept begins or continues one."""

from __future__ import annotations

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_request import Engine
from test_engine_properties import EOG, N_VOCAB, PROMPT, PROTECTED, Oracle, require_same, scripts, windows

from pyfly_cpp import Exact, FlyLlama, Margin, Window
from pyfly_cpp._native import CallbackDrafter, ScriptedTarget
from pyfly_cpp.engine.markers import find_markers

PIECES = [b"", b"[I", b"[", b"IN", b"ST]", b"a", b" x[INS", b"T", b"<\xe2\x82"]  # 0 and 1 are control tokens
MARKERS = ["[INST]", "STx", "<\u20ac"]
CONTROL = {EOG, PROTECTED}


def writes(text, token):
    """Whether a token's bytes behind a text are part of a marker or of the beginning of one."""
    start = max((i + 1 for i, t in enumerate(text) if t in CONTROL), default=0)
    before = b"".join(PIECES[t] for t in text[start:])
    whole = before + PIECES[token]
    return any(
        i + len(marker) > len(before) and (whole.startswith(marker, i) or marker.startswith(whole[i:]))
        for marker in (text.encode() for text in MARKERS)
        for i in range(len(whole))
        if len(whole) > len(before)
    )


class MarkerOracle(Oracle):
    """Defers nothing that writes a marker, nor in place of what does."""

    def defers(self, text, token, choice, n_left):
        return not writes(text, token) and not writes(text, choice) and super().defers(text, token, choice, n_left)


def decode(script, gate, window, k, n, markers=MARKERS):
    with ScriptedTarget(script.row, N_VOCAB, pieces=PIECES) as target, Engine(target) as engine:
        target.protect([PROTECTED], [EOG])
        target.protect_texts(markers)
        engine.configure(gate, window, [(CallbackDrafter(lambda history: script.draft(history, k)), k)])
        engine.begin(PROMPT)
        out = []
        while len(out) < n and EOG not in out:
            engine.step()
            out += [token for _, token in engine.tokens()]
    return out[: out.index(EOG) + 1] if EOG in out else out


@settings(max_examples=200, deadline=None)
@given(scripts, st.sampled_from([0.3, 1.0, 5.0]), windows, st.integers(0, 8))
def test_commits_what_the_oracle_commits(script, tau, window, k):
    n = 25
    require_same(decode(script, Margin(tau), window, k, n), MarkerOracle(script, tau, window, k, 4096).run(n), n)


@settings(max_examples=50, deadline=None)
@given(scripts, windows, st.integers(0, 8))
def test_exact_decoding_is_as_without_markers(script, window, k):
    assert decode(script, Exact(), window, k, 25) == decode(script, Exact(), window, k, 25, markers=[])


@pytest.mark.parametrize(
    ("before", "drafted", "choice", "is_loose"),
    [
        ([5], 7, 5, True),
        ([5], 2, 5, False),  # [ begins [INST]
        ([5], 5, 2, False),
        ([2, 3], 7, 5, True),  # [IN is not continued by T, nor by a
        ([2, 3], 4, 5, False),
        ([2, 3], 5, 4, False),
        ([2, 3, PROTECTED], 4, 5, True),  # a control token ends what was begun
        ([5], 6, 5, False),  # begins in the middle of a token
    ],
)
def test_what_begins_or_continues_one(before, drafted, choice, is_loose):
    def row(history):
        return [1.0 if t == choice else 0.9 if t == drafted else -5.0 for t in range(N_VOCAB)]

    with ScriptedTarget(row, N_VOCAB, pieces=PIECES) as target, Engine(target) as engine:
        target.protect([PROTECTED], [EOG])
        target.protect_texts(["[INST]"])
        engine.configure(Margin(0.3), Window(0), [(CallbackDrafter(lambda history: [drafted]), 1)])
        engine.begin(before)
        engine.step()
        assert engine.record(0).origin == ("loose" if is_loose else "target")
        assert engine.record(0).reason == ("loose" if is_loose else "safety")


def test_an_empty_text_is_refused():
    with ScriptedTarget(lambda history: [], N_VOCAB) as target, pytest.raises(ValueError, match="empty"):
        target.protect_texts(["a", ""])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{{ bos_token }}{% if a < b %}[INST] {{ message['content'] }} [/INST]", {"[INST]", "[/INST]"}),
        ("\n\n### Instruction:\nGo.\n\n### Response:\n", {"### Instruction:", "### Response:"}),
        ("'<tool_call>\\n<function=' + name + '>'", {"<tool_call>", "<function="}),
        ("content.split('</think>')[-1]", {"</think>"}),
        ("<|im_start|>system\n# Tools [1] items[A] x <= y", {"<|im_start|>"}),
    ],
)
def test_what_is_found(text, found):
    assert find_markers(text) == found


@pytest.mark.parametrize(
    ("chat_format", "markers"),
    [
        (None, set()),
        ("alpaca", {"### Instruction:", "### Response:"}),
        ("llama-2", {"[INST]", "[/INST]"}),
    ],
)
def test_markers_of_a_model(tiny_target, chat_format, markers):
    """What its vocabulary has no token for; those of tool calls always."""
    with_text = {"n_ctx": 128, "n_threads": 1, "verbose": False}
    llm = FlyLlama(tiny_target, chat_format=chat_format, **with_text)
    found = set(llm.protected_texts)
    assert markers | {"<tool_call>", "</tool_call>"} <= found
    assert not any(len(llm.tokenize(m.encode(), add_bos=False, special=True)) == 1 for m in found)
    llm.close()


def test_a_chat_format_that_fails_is_no_reason_not_to_load(tiny_target, monkeypatch):
    def broken(**_):
        raise RuntimeError("mine")

    monkeypatch.setattr(llama_cpp.llama_chat_format, "get_chat_completion_handler", lambda name: broken)
    FlyLlama(tiny_target, chat_format="alpaca", n_ctx=128, n_threads=1, verbose=False).close()
