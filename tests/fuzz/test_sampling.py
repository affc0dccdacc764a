"""Random arguments of a completion: `FlyLlama` answers, or refuses, as plain `llama_cpp.Llama` does."""

from __future__ import annotations

import math

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList

from pyfly_cpp import DraftModel, FlyLlama, PromptLookup

pytestmark = pytest.mark.fuzz

F32 = llama_cpp.GGML_TYPE_F32
PROMPTS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "Tom has 3 apples and 4 pears. Tom has 3 apples and",
    "A",
    "",
    [300, 301, 302, 303],
]
GRAMMARS = ['root ::= "yes" | "no"', "root ::= [a-z ]+", 'root ::= "{" [0-9]+ "}"']


def arguments(rng):
    """Some arguments of create_completion; the seed is always among them."""

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    choices = {
        "max_tokens": lambda: pick(0, 1, 7, 24, 40, None, -1, 10.0, 2.5, math.inf, 2**31, 2**40),
        "temperature": lambda: pick(0.0, 0.2, 0.7, 1.0, 1.5, 3.0, -1.0),
        "top_k": lambda: pick(0, -1, 1, 5, 40, 100000),
        "top_p": lambda: pick(0.0, 0.1, 0.5, 0.95, 1.0, 1.5),
        "min_p": lambda: pick(0.0, 0.05, 0.5, 1.0),
        "typical_p": lambda: pick(0.2, 0.9, 1.0),
        "repeat_penalty": lambda: pick(1.0, 1.1, 1.8, 0.9),
        "frequency_penalty": lambda: pick(0.0, 0.5, -0.3, 2.0),
        "presence_penalty": lambda: pick(0.0, 0.5, -0.3),
        "mirostat_mode": lambda: pick(0, 1, 2, 3),
        "mirostat_tau": lambda: pick(1.0, 5.0),
        "mirostat_eta": lambda: pick(0.0, 0.1, 1.0),
        "stop": lambda: pick([], ["."], "e", ["\n", "the"], ["no such text"]),
        "echo": lambda: pick(False, True),
        "logprobs": lambda: pick(None, 0, 3),
        "suffix": lambda: pick(None, " end."),
        "logit_bias": lambda: pick(None, {300: 5.0}, {"301": -100.0, 5: 2.0}),
        "grammar": lambda: pick(None, LlamaGrammar.from_string(pick(*GRAMMARS), verbose=False)),
        "logits_processor": lambda: pick(None, LogitsProcessorList([lambda ids, row: row * np.float32(0.5)])),
    }
    names = [name for name in choices if rng.random() < 0.3]
    given = {name: choices[name]() for name in names}
    if given.get("logit_bias"):
        given.pop("logits_processor", None)  # the base class forgets both where both are given
    given = {"prompt": pick(*PROMPTS), "seed": pick(0, 1, 7, 2**31 + 5), "temperature": pick(0.0, 0.8), **given}
    if not isinstance(given["prompt"], str):
        given.pop("echo", None)  # the base class cannot
    if given["prompt"] == "":
        given["max_tokens"] = None  # the base class counts BOS as a token of the answer
    return given


def outcome(llm, given):
    """The choices, or None where the request was refused."""
    given = dict(given)
    if given.get("logits_processor") is not None:
        given["logits_processor"] = LogitsProcessorList(given["logits_processor"])  # the base class appends to it
    try:
        choices = llm.create_completion(**given)["choices"]
    except Exception:
        return None
    for choice in choices:
        # The base class is a row off with echo, has the tokens of a stop string, and leaves out characters of several
        # tokens; test_drop_in.py has what is right.
        is_stopped = bool(given.get("stop")) and choice["finish_reason"] == "stop"
        if given.get("echo") or not given["prompt"] or is_stopped or not choice["text"].isascii():
            choice["logprobs"] = None
        for named in (choice["logprobs"] or {}).get("top_logprobs", ()):
            named.pop("", None)  # of several tokens without a character of their own
    return choices


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (float, np.floating)) and isinstance(b, (float, np.floating)):
        return bool(abs(a - b) <= 1e-3)
    return bool(a == b)


def explained_by_a_character(found, expected):
    """Whether the base class went on beyond the limit, to the end of a character or of the next ones."""
    if not found or not expected:
        return False
    ours, theirs = (choices[0] for choices in (found, expected))
    return ours["finish_reason"] == "length" and theirs["text"].startswith(ours["text"])


def explained_by_noise(base, given, found):
    """Whether the base class itself answers so if its rows are moved by what kernels round: a token may stand so close
    to a limit of min_p or top_p, or to the number drawn, that it falls on the other side. Seed 277 is such a case: a
    probability is within 2e-8 of min_p times the largest one, and the rows of a batch differ by 2e-6."""
    if given["temperature"] == 0.0:
        return False
    rng = np.random.default_rng(0)
    noise = LogitsProcessorList([lambda ids, row: row + rng.normal(scale=5e-6, size=row.shape).astype(np.float32)])
    for _ in range(30):
        base.reset()
        moved = {**given, "logits_processor": [*noise, *(given.get("logits_processor") or [])]}
        if same(outcome(base, moved), found):
            return True
    return False


@pytest.mark.parametrize("n_batch", [16, 512])
def test_against_the_base_class(cases, n_batch, tiny_target_f32, tiny_draft):
    options = {"n_ctx": 256, "n_batch": n_batch, "n_threads": 1, "n_threads_batch": 1, "type_k": F32, "type_v": F32,
               "verbose": False, "logits_all": True}  # fmt: skip
    base = llama_cpp.Llama(tiny_target_f32, **options)
    flies = [
        FlyLlama(tiny_target_f32, adaptive=False, **{**options, "logits_all": False}, drafter=drafter)
        for drafter in (None, PromptLookup(num_pred_tokens=6), DraftModel(tiny_draft, draft_max=5))
    ]
    for seed in cases(40):
        given = arguments(np.random.default_rng(seed))
        for llm in (base, *flies):
            llm.reset()
        expected = outcome(base, given)
        for fly in flies:
            found = outcome(fly, given)
            assert (
                same(found, expected)
                or explained_by_a_character(found, expected)
                or explained_by_noise(base, given, found)
            ), f"{given}\n{found}\n{expected}"
