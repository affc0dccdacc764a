"""Tokens a second as shipped, against plain stock llama-cpp-python: `llama_cpp.Llama` with llama.cpp's own kernels.

    python benchmarks/end_to_end.py --model MODEL [-n 96] [--per-kind 2] [--temperature 0,0.7] [--threads N]
        [--record FILE.json.gz]

Every side answers every built-in prompt, governed and exact, in a process of its own (`sides.py`), one after the other,
so that whatever else the machine does slows all alike. Timed is what follows the first token. A side's answers must be
those of `plain`, our kernels without drafts, token for token; how many are not is counted. `auto` is the default of the
commands. Ratios are of tokens a second to llama.cpp's: geometric means over the prompts of a kind, then over the kinds,
with the smallest kind.

At a temperature above 0 (that of `chat` is 0.7) all sides answer a question with the same seed. Each temperature has
processes of its own, so that nothing is copied from answers at another one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack
from statistics import geometric_mean

from common import add_record, markdown, model_parser, print_machine, record
from sides import Answered, Side, middle, ratio

from pyfly_cpp.machine.prompt_sets import read_prompts

NAMES = ("llama.cpp", "plain", "lookup", "auto")

Answers = dict[str, dict[str, list[Answered]]]
"""By side and kind."""


def main() -> None:
    parser = model_parser(__doc__, n=96)
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--temperature", default="0", help="one or several, such as 0,0.7 (default 0)")
    add_record(parser)
    given = parser.parse_args()
    temperatures = [float(text) for text in given.temperature.split(",")]
    machine = print_machine()
    kinds: dict[str, list[str]] = defaultdict(list)
    for prompt in read_prompts():
        if len(kinds[prompt.category]) < given.per_kind:
            kinds[prompt.category].append(prompt.turns[0])
    measured = {f"{temperature:g}": ask(given, kinds, temperature) for temperature in temperatures}
    rows = [[one[0], temperature, *one[1:]] for temperature, answers in measured.items() for one in rows_of(answers)]
    print()
    print(markdown(["side", "temperature", *kinds, "mean", "least", "answers that differ from plain"], rows))
    record(given.record, machine, measured)


def ask(given: argparse.Namespace, kinds: dict[str, list[str]], temperature: float) -> Answers:
    """What each side answers to the questions of each kind."""
    answers: Answers = {name: defaultdict(list) for name in NAMES}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, given, 2048)) for name in NAMES]
        for kind, questions in kinds.items():
            for seed, question in enumerate(questions):
                tokens = sides[-1].prompt(question)
                for side in sides:
                    answers[side.name][kind].append(side.answer(tokens, given.n, temperature, seed))
    return answers


def rows_of(answers: Answers) -> list[list[str]]:
    """A row of the table for each side."""
    stock, plain = answers["llama.cpp"], answers["plain"]
    differing = {
        name: str(sum(a.tokens != b.tokens for kind in plain for a, b in zip(of[kind], plain[kind])))
        for name, of in answers.items()
    }
    speeds = [f"{middle(of_kind, 'speed'):.1f}" for of_kind in stock.values()]
    rows = [["llama.cpp, tokens/s", *speeds, "", "", differing["llama.cpp"]]]
    for name in NAMES[1:]:
        means = [geometric_mean(ratio(answers[name][kind], stock[kind], "speed")) for kind in stock]
        rows.append([name, *(f"{one:.2f}" for one in (*means, geometric_mean(means), min(means))), differing[name]])
    return rows


if __name__ == "__main__":
    main()
