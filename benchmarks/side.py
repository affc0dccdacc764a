"""One side of `sides.py`: `python side.py NAME`, lines of JSON in and out.

The first line has the arguments of `llama_cpp.Llama`. Each other is a question, answered by the tokens of a chat, or a
prompt, answered: its tokens, seconds to the first, and in all. Plain llama-cpp-python imports nothing of ours.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import llama_cpp

STOCK = {"llama.cpp": False, "flash": True}
"""Plain `llama_cpp.Llama`, and whether with flash attention."""
OURS = ("plain", "lookup", "auto")
"""FlyLlama without drafts, with prompt lookup, and as it ships; exact and governed."""


def load(name: str, options: dict[str, Any]) -> Any:
    """The model as a side has it."""
    if name in STOCK:
        return llama_cpp.Llama(flash_attn=STOCK[name], **options)
    from pyfly_cpp import FlyLlama, PromptLookup

    drafter = dict(zip(OURS, (None, PromptLookup(), "auto")))[name]
    return FlyLlama(drafter=drafter, **options)


def prompt(llm: Any, question: str, most: int | None) -> list[int]:
    """The tokens of a chat of one question, cut to its last `most` tokens."""
    from pyfly_cpp.llama.prompting import render_chat

    if most is not None:
        tokens = llm.tokenize(question.encode(), add_bos=False)
        question = llm.detokenize(tokens[-most:]).decode(errors="ignore")
    return list(render_chat(llm, [{"role": "user", "content": question}]).tokens)


def answer(llm: Any, prompt: list[int], n: int, temperature: float, seed: int) -> tuple[list[int], float, float]:
    """Up to n tokens. At a temperature above 0 they are truncated as `Llama.generate` does by default."""
    llm.reset()
    llm.set_seed(seed)
    ends = {llm.token_eos(), llama_cpp.llama_vocab_eot(llm._model.vocab)}
    begin = time.perf_counter()
    tokens = iter(llm.generate(prompt, temp=temperature))
    out = [next(tokens)]
    first = time.perf_counter() - begin
    out += itertools.takewhile(lambda token: token not in ends, itertools.islice(tokens, n - 1))
    return out, first, time.perf_counter() - begin


def main(name: str) -> None:
    llm = load(name, json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        said = prompt(llm, **asked) if "question" in asked else answer(llm, **asked)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
