"""`settings_orders.py TARGET DRAFT OTHER EAGLE3 FIRST N`: N orders of settings that change between requests, from seed
FIRST on. Prints each seed when it begins and `done` at the end; ends with an error where an answer is wrong.

A process of its own, so that whoever started it can end one that hangs."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import numpy as np

from pyfly_cpp import CrossVocabulary, Decoding, DraftModel, Eagle3, FlyLlama, PromptLookup, PyflyError, Window
from pyfly_cpp.decoding.gates import parse_gate
from pyfly_cpp.decoding.presets import SHIPPED, load_preset
from pyfly_cpp.decoding.resolve import resolve_setting
from pyfly_cpp.machine import kernel_findings

# Answers are compared, so kernels that are right are used, however slow a noisy machine found them (tests/conftest.py).
kernel_findings._LOOKS = sys.maxsize

GATES = ("exact", "margin:0.3", "margin:1", "entropy:0.3", "stochastic", "exact-first", "all(margin:0.5,no-repeat:8)")
WINDOWS = (None, Window(4), Window(4, "reconverge", 1), Window(2, "reconverge", across_rounds=False))


class Orders:
    """One model with plain answers to compare with, and whoever changes its settings."""

    def __init__(self, target, draft, other, eagle3):
        self.target = target
        self.drafters = (
            None,
            PromptLookup(),
            PromptLookup(memory=0),
            DraftModel(draft),
            CrossVocabulary(DraftModel(other)),
            [PromptLookup(), DraftModel(draft)],
            [PromptLookup(), CrossVocabulary(DraftModel(other))],
            Eagle3(eagle3),
            [PromptLookup(), Eagle3(eagle3)],
            lambda tokens, **_: tokens[-3:],
        )
        self.texts = ["Tom has 3 apples and buys 4 more.", "How many apples", "1, 2, 3, 1, 2, 3, 1,", "Anna"]
        self.plain = {}

    def open(self, rng, **more):
        kernels = "stock" if rng.random() < 0.15 else "auto"
        return FlyLlama(
            self.target, n_ctx=256, n_batch=int(rng.choice([16, 64, 256])), n_threads=1, n_threads_batch=1,
            verbose=False, kernels=kernels, **more,
        ), kernels == "auto"  # fmt: skip

    def change(self, llm, rng):
        """One change, as Python, `chat` and the server make them; one that is refused changes nothing."""
        kind = int(rng.choice(7, p=(0.35, 0.15, 0.1, 0.2, 0.05, 0.05, 0.1)))
        try:
            if kind == 0:
                llm.drafter = None if rng.random() < 0.3 else self.drafters[int(rng.integers(len(self.drafters)))]
            elif kind == 1:
                preset = load_preset(list(SHIPPED)[int(rng.integers(len(SHIPPED)))])
                llm.decoding = resolve_setting(preset, ("auto", "lookup")[int(rng.integers(2))])
            elif kind == 2:
                llm.gate = parse_gate(GATES[int(rng.integers(len(GATES)))])
            elif kind == 3:
                llm.adaptive = (None, True, False)[int(rng.integers(3))]
            elif kind == 4:
                llm.window = WINDOWS[int(rng.integers(len(WINDOWS)))]
            elif kind == 5:
                llm.draft_max = (None, 1, 4, 15)[int(rng.integers(4))]
            else:
                llm.decoding = replace(Decoding(), adaptive=bool(rng.integers(2)), drafter="none")
        except (PyflyError, ValueError):
            pass

    def ask(self, llm, rng, is_exact):
        text = self.texts[int(rng.integers(len(self.texts)))] * int(rng.integers(1, 4))
        n = int(rng.integers(1, 25))
        try:
            answer = llm.create_completion(text, max_tokens=n, temperature=0.0)
        except (PyflyError, ValueError):
            return  # a gate that this drafter cannot serve
        assert answer["usage"]["completion_tokens"] <= n
        if is_exact and str(llm.gate) == "exact":
            if (text, n) not in self.plain:
                with FlyLlama(self.target, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False) as plain:
                    self.plain[text, n] = plain.create_completion(text, max_tokens=n, temperature=0.0)
            assert answer["choices"] == self.plain[text, n]["choices"], (text, n)

    def run(self, seed):
        rng = np.random.default_rng(seed)
        llm, is_exact = self.open(rng)
        with llm:
            for _ in range(int(rng.integers(2, 6))):
                for _ in range(int(rng.integers(1, 4))):
                    self.change(llm, rng)
                self.ask(llm, rng, is_exact)


if __name__ == "__main__":
    *models, first, n = sys.argv[1:]
    warnings.simplefilter("ignore")
    orders = Orders(*models)
    for seed in range(int(first), int(first) + int(n)):
        print(seed, flush=True)
        orders.run(seed)
    print("done", flush=True)
