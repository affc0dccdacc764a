"""Tokens a second as shipped, against plain stock llama-cpp-python: `llama_cpp.Llama` with llama.cpp's own kernels.

    python benchmarks/end_to_end.py --model MODEL [-n 96] [--per-kind 2] [--threads N]

Every way answers every built-in prompt, governed and exact, one after the other, so that whatever else the machine does
slows all alike. Timed is what follows the first token. A way's answers must be those of `plain`, our kernels without
drafts, token for token; how many are not is counted. `auto` is the default of the commands. Ratios are of tokens a
second to `stock`: geometric means over the prompts of a kind, then over the kinds, with the smallest kind.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import geometric_mean, median
from typing import Any

import llama_cpp
from common import llama_options, model_parser, print_machine

from pyfly_cpp import FlyLlama, PromptLookup, _native
from pyfly_cpp.llama.prompting import render_chat
from pyfly_cpp.machine import extra_buffers
from pyfly_cpp.machine.prompt_sets import read_prompts


def answer(llm: Any, prompt: list[int], n: int) -> tuple[list[int], float]:
    """Up to n greedy tokens, and tokens a second behind the first."""
    llm.reset()
    ends = {llm.token_eos(), llama_cpp.llama_vocab_eot(llm._model.vocab)}
    tokens: Iterator[int] = llm.generate(prompt, temp=0.0)
    out = [next(tokens)]
    begin = time.perf_counter()
    out += itertools.takewhile(lambda token: token not in ends, itertools.islice(tokens, n - 1))
    return out, (len(out) - 1) / (time.perf_counter() - begin)


def main() -> None:
    parser = model_parser(__doc__, n=96)
    parser.add_argument("--per-kind", type=int, default=2)
    given = parser.parse_args()
    print_machine()
    options = {"n_ctx": 2048, **llama_options(given)}
    ways: dict[str, Any] = {"plain": None, "lookup": PromptLookup(), "auto": "auto"}
    _native.take_kernels_everywhere(0)
    extra_buffers.guard_llama_cpp()
    loaded: dict[str, Any] = {"stock": llama_cpp.Llama(given.model, **options)}
    loaded |= {name: FlyLlama(given.model, drafter=drafter, **options) for name, drafter in ways.items()}

    speeds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in loaded}
    differing = dict.fromkeys(loaded, 0)
    kinds: dict[str, list[Any]] = defaultdict(list)
    for prompt in read_prompts():
        kinds[prompt.category].append(prompt)
    for kind, prompts in kinds.items():
        for prompt in prompts[: given.per_kind]:
            rendered = render_chat(loaded["plain"], [{"role": "user", "content": prompt.turns[0]}]).tokens
            texts = {}
            for name, llm in loaded.items():
                texts[name], speed = answer(llm, rendered, given.n)
                speeds[name][kind].append(speed)
            for name, text in texts.items():
                differing[name] += text != texts["plain"]
    print(f"\n| way | {' | '.join(kinds)} | mean | answers that differ from plain |")
    print("| --- | " + "---: | " * len(kinds) + "---: | ---: |")
    stock = " | ".join(f"{median(speeds['stock'][kind]):.1f}" for kind in kinds)
    print(f"| stock, tokens/s | {stock} | | {differing['stock']} |")
    for name in list(loaded)[1:]:
        ratios = [
            geometric_mean(ours / stock for ours, stock in zip(speeds[name][kind], speeds["stock"][kind]))
            for kind in kinds
        ]
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {cells} | {geometric_mean(ratios):.2f} | {differing[name]} |")


if __name__ == "__main__":
    main()
