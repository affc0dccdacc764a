"""Tokens a second as shipped, against plain stock llama-cpp-python: `llama_cpp.Llama` with llama.cpp's own kernels.

    python benchmarks/end_to_end.py --model MODEL [-n 96] [--per-kind 2] [--threads N] [--record FILE.json.gz]

Every side answers every built-in prompt, governed and exact, in a process of its own (`sides.py`), one after the other,
so that whatever else the machine does slows all alike. Timed is what follows the first token. A side's answers must be
those of `plain`, our kernels without drafts, token for token; how many are not is counted. `auto` is the default of the
commands. Ratios are of tokens a second to llama.cpp's: geometric means over the prompts of a kind, then over the kinds,
with the smallest kind.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from statistics import geometric_mean

from common import add_record, markdown, model_parser, print_machine, record
from sides import Answered, Side, middle, ratio

from pyfly_cpp.machine.prompt_sets import read_prompts

NAMES = ("llama.cpp", "plain", "lookup", "auto")


def main() -> None:
    parser = model_parser(__doc__, n=96)
    parser.add_argument("--per-kind", type=int, default=2)
    add_record(parser)
    given = parser.parse_args()
    machine = print_machine()
    kinds: dict[str, list[str]] = defaultdict(list)
    for prompt in read_prompts():
        if len(kinds[prompt.category]) < given.per_kind:
            kinds[prompt.category].append(prompt.turns[0])
    answers: dict[str, dict[str, list[Answered]]] = {name: defaultdict(list) for name in NAMES}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, given, 2048)) for name in NAMES]
        for kind, questions in kinds.items():
            for question in questions:
                tokens = sides[-1].prompt(question)
                for side in sides:
                    answers[side.name][kind].append(side.answer(tokens, given.n))
    differing = {
        name: sum(one.tokens != plain.tokens for kind in kinds for one, plain in zip(of[kind], answers["plain"][kind]))
        for name, of in answers.items()
    }
    stock = answers["llama.cpp"]
    rows = [
        ["llama.cpp, tokens/s", *(f"{middle(stock[kind], 'speed'):.1f}" for kind in kinds), "", "",
         str(differing["llama.cpp"])],
    ]  # fmt: skip
    for name in NAMES[1:]:
        means = [geometric_mean(ratio(answers[name][kind], stock[kind], "speed")) for kind in kinds]
        of_all = [f"{one:.2f}" for one in (*means, geometric_mean(means), min(means))]
        rows.append([name, *of_all, str(differing[name])])
    print()
    print(markdown(["side", *kinds, "mean", "least", "answers that differ from plain"], rows))
    record(given.record, machine, answers)


if __name__ == "__main__":
    main()
