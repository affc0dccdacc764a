"""One side of `sides.py`: `python side.py NAME`, lines of JSON in and out.

The first line has the arguments of `llama_cpp.Llama`, and for a side with a head its file as `head`. Each other line
has messages, answered by the tokens of a chat, or a prompt, answered by its tokens, the seconds to the first and in
all, and what FlyLlama counted meanwhile (null for a stock side). Plain llama-cpp-python imports nothing of ours.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

STOCK = {"llama.cpp": None, "flash": None, "stock lookup": 10, "stock lookup 2": 2}
"""Plain `llama_cpp.Llama`: as it is, with flash attention, and with its own prompt lookup, which drafts so many tokens.
10 is its default, and 2 its documentation's advice for CPUs."""
OURS = ("plain", "lookup", "auto")
"""FlyLlama without drafts, with prompt lookup, and as it ships; exact and governed. `NAME+head` has a head as well."""


def load(name: str, options: dict[str, Any]) -> Any:
    """The model as a side has it."""
    if name in STOCK:
        if (n := STOCK[name]) is not None:  # without all logits it refuses prompts of more than a batch
            options = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=n), "logits_all": True, **options}
        return llama_cpp.Llama(flash_attn=name == "flash", **options)
    from pyfly_cpp import FlyLlama, PromptLookup
    from pyfly_cpp.decoding.resolve import drafter_of_file, resolve

    head = options.pop("head", None)
    first, _, with_head = name.partition("+")
    drafter: Any = {"plain": None, "lookup": PromptLookup(), "auto": "auto"}[first]
    if with_head:
        model = options["model_path"]
        drafter = [*resolve(model, drafter).drafters, drafter_of_file(model, head)]
    return FlyLlama(drafter=drafter, **options)


def prompt(llm: Any, messages: list[dict[str, Any]], tools: list[Any] | None, most: int | None) -> list[int]:
    """The tokens of a chat, its last message cut to its last `most` tokens."""
    from pyfly_cpp.llama.prompting import render_chat

    if most is not None:
        tokens = llm.tokenize(messages[-1]["content"].encode(), add_bos=False)
        last = {**messages[-1], "content": llm.detokenize(tokens[-most:]).decode(errors="ignore")}
        messages = [*messages[:-1], last]
    return list(render_chat(llm, messages, tools=tools).tokens)


COUNTERS = (
    "rounds", "beginnings", "committed", "committed_first", "drafted_at_depth", "accepted_at_depth",
    "accepted_by_drafter", "accepted_from_answers", "seconds_prefill", "seconds_draft", "seconds_verify",
    "seconds_gate", "seconds_python",
)  # fmt: skip
"""Of FlyLlama's `Stats`, for an answer."""


def answer(
    llm: Any, prompt: list[int], n: int, temperature: float, seed: int
) -> tuple[list[int], float, float, dict[str, Any] | None]:
    """Up to n tokens. At a temperature above 0 they are truncated as `Llama.generate` does by default."""
    llm.reset()
    llm.set_seed(seed)
    if hasattr(llm, "reset_stats"):
        llm.reset_stats()
    ends = {llm.token_eos(), llama_cpp.llama_vocab_eot(llm._model.vocab)}
    begin = time.perf_counter()
    tokens = iter(llm.generate(prompt, temp=temperature))
    out = [next(tokens)]
    first = time.perf_counter() - begin
    out += itertools.takewhile(lambda token: token not in ends, itertools.islice(tokens, n - 1))
    total = time.perf_counter() - begin
    counters = llm.stats.as_dict() if hasattr(llm, "stats") else None
    return out, first, total, counters and {name: counters[name] for name in COUNTERS}


def main(name: str) -> None:
    llm = load(name, json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        said = prompt(llm, **asked) if "messages" in asked else answer(llm, **asked)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
