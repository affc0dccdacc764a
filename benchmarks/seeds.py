"""How many sampled answers differ from plain decoding with the same seed, although verification is exact.

    python benchmarks/seeds.py --model MODEL [--draft DRAFT] [-n 48] [--seeds 8] [--threads N]

Three prompts, each with so many seeds, are answered plainly, with prompt lookup, and with the draft model (by default
the model itself), at most four drafts per step: with the default sampling, and with temperature 1.5 without truncation;
with llama.cpp's kernels and with ours.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from common import llama_options, model_parser, print_machine

from pyfly_cpp import DraftModel, FlyLlama, PromptLookup
from pyfly_cpp.machine import kernels

PROMPTS = ("Natalia sold clips to 48 of her friends in April.", "Once upon a time", "def add(a, b):")
SAMPLING: dict[str, dict[str, Any]] = {
    "default": {},
    "temperature 1.5, no truncation": {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}


def main() -> None:
    parser = model_parser(__doc__, n=48)
    parser.add_argument("--draft")
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    print_machine()
    options = {"n_ctx": 512, **llama_options(given)}

    def answers(choice: str, sampling: dict[str, Any], drafter: Any) -> list[str]:
        drafting = {} if drafter is None else {"drafter": drafter, "draft_max": 4}
        with closing(FlyLlama(given.model, kernels=choice, **drafting, **options)) as llm:
            return [
                llm.create_completion(prompt, max_tokens=given.n, seed=seed, **sampling)["choices"][0]["text"]
                for prompt in PROMPTS
                for seed in range(1, given.seeds + 1)
            ]

    print("\n| sampling | kernels | prompt lookup | draft model | of |\n| --- | --- | ---: | ---: | ---: |")
    for name, sampling in SAMPLING.items():
        for choice in kernels.CHOICES[::-1]:
            plain = answers(choice, sampling, None)
            differing = [
                sum(text != own for text, own in zip(plain, answers(choice, sampling, drafter)))
                for drafter in (PromptLookup(), DraftModel(given.draft or given.model))
            ]
            print(f"| {name} | {choice} | {differing[0]} | {differing[1]} | {len(plain)} |", flush=True)


if __name__ == "__main__":
    main()
