"""A summary of a long document: seconds to its first token and in all, as shipped, against llama.cpp.

    python benchmarks/documents.py --model MODEL [--tokens 16000] [--cache q8_0] [-n 200] [--turns 2] [--threads N]
        [--sides llama.cpp,flash,plain,auto] [--record FILE.json.gz]

The document is this repository's docs/, page after page, cut to so many tokens of the model. Each side answers in a
process of its own, in turns (`sides.py`), and greedily: `llama.cpp` is plain `llama_cpp.Llama`, `flash` the same with
flash attention, which it needs for a quantised cache, `plain` is FlyLlama without drafts, and `auto` FlyLlama as it
ships. Ratios are medians, with their range, of those to the first side in the same turn.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from common import add_record, markdown, model_parser, positive, print_machine, record, spread
from side import OURS, STOCK
from sides import Answered, Side, middle, names, ratio

from pyfly_cpp.machine.cache_types import CACHE_WORDS

DOCS = Path(__file__).parents[1] / "docs"
QUESTION = "\n\nSummarise the documentation above in ten sentences."
MARGIN = 256
"""Tokens of the template, at most."""


def main() -> None:
    parser = model_parser(__doc__, n=200)
    parser.add_argument("--tokens", type=positive, default=16000, help="of the question (default 16000)")
    parser.add_argument("--cache", default="f16", choices=sorted(CACHE_WORDS))
    parser.add_argument("--turns", type=positive, default=2)
    parser.add_argument(
        "--sides", type=names, default="llama.cpp,flash,plain,auto", help=f"of {', '.join((*STOCK, *OURS))}"
    )
    add_record(parser)
    given = parser.parse_args()
    machine = print_machine()
    pages = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    answers: dict[str, list[Answered]] = {name: [] for name in given.sides}
    with ExitStack() as stack:
        n_ctx = given.tokens + given.n + MARGIN
        sides = [stack.enter_context(Side(name, given.model, n_ctx, given.threads, given.cache)) for name in answers]
        asked = [{"role": "user", "content": pages + QUESTION}]
        prompt = next(side for side in sides if side.name not in STOCK).prompt(asked, most=given.tokens)
        for _ in range(given.turns):
            for side in sides:
                one = side.answer(prompt, given.n)
                answers[side.name].append(one)
                print(f"{side.name}: {one.first:.1f} s, {one.total:.1f} s", flush=True)
    record(given.record, machine, answers)
    base, theirs = next(iter(answers.items()))
    rows = [
        [
            name, f"{middle(ours, 'first'):.1f}", spread(ratio(theirs, ours, "first")), f"{middle(ours, 'total'):.1f}",
            spread(ratio(theirs, ours, "total")), f"{middle(ours, 'speed'):.1f}", spread(ratio(ours, theirs, "speed")),
        ]
        for name, ours in answers.items()
    ]  # fmt: skip
    n_written = ", ".join(str(len(of[0].tokens)) for of in answers.values())
    print(f"\n{len(prompt)} tokens, {given.cache} cache; answers of {n_written} tokens\n")
    head = ["side", "first token, s", f"{base} / it", "in all, s", f"{base} / it", "then tokens/s", f"of {base}'s"]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
