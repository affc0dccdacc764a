"""Tokens a second as shipped, against plain stock llama-cpp-python: `llama_cpp.Llama` with llama.cpp's own kernels.

    python benchmarks/end_to_end.py --model MODEL [-n 96] [--per-kind 2] [--kinds edit,chat,...] [--temperature 0,0.7]
        [--sides llama.cpp,plain,lookup,auto] [--head FILE] [--threads N] [--record FILE.json.gz]

Every side answers prompts of what people do (`prompts/`), governed and exact, in a process of its own (`sides.py`), one
after the other, so that whatever else the machine does slows all alike. Another side begins each time, and each has
answered something before. Timed is what follows the first token. A side's answers must be those of `plain`, our kernels
without drafts, token for token; how many are not is counted. `auto` is the default of the commands. Ratios are of
tokens a second to llama.cpp's: geometric means over the prompts of a kind, then over the kinds, with the smallest kind.

At a temperature above 0 (that of `chat` is 0.7) all sides answer a question with the same seed. Each temperature has
processes of its own, so that nothing is copied from answers at another one.

`--prompts pyfly_cpp/machine/prompts.jsonl` asks the twelve built-in prompts instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import geometric_mean
from typing import Any

import side
import sides
from common import add_record, markdown, model_parser, positive, print_machine, record
from sides import Answered, Side, middle
from task_prompts import KINDS, TaskPrompt, pick

from pyfly_cpp.machine.prompt_sets import read_prompts

STOCK, PLAIN = "llama.cpp", "plain"
NAMES = (STOCK, PLAIN, "lookup", "auto")
CONTEXT = 4096
"""Tokens that hold all kinds but `summary-8k`."""

Row = dict[str, Any]
"""What a prompt was answered: `id`, `kind`, `held_out`, `n_prompt`, and `answers` by side."""


def ask(
    model: str,
    prompts: Sequence[TaskPrompt],
    *,
    names: Sequence[str],
    n: int,
    temperature: float,
    n_ctx: int,
    threads: int,
    head: str | None = None,
) -> list[Row]:
    """What each side answers to each prompt, up to n tokens. One of the sides must be ours: it makes tokens of the
    prompts. `head`: the file of sides with a head."""
    rows = []
    with ExitStack() as stack:
        run = [stack.enter_context(Side(name, model, n_ctx, threads, head=head)) for name in names]
        ours = next(one for one in run if one.name not in side.STOCK)
        for one in run:
            one.answer(ours.prompt([{"role": "user", "content": "Say hello."}]), 8)
        for i, prompt in enumerate(prompts):
            tokens = ours.prompt(prompt.messages, prompt.tools)
            turn = i % len(run)
            answers = {one.name: one.answer(tokens, n, temperature, i) for one in (*run[turn:], *run[:turn])}
            rows.append({"id": prompt.id, "kind": prompt.kind, "held_out": prompt.held_out, "n_prompt": len(tokens),
                         "answers": {name: answers[name] for name in names}})  # fmt: skip
            print(f"{prompt.id}: {', '.join(f'{name} {one.speed:.1f}' for name, one in answers.items())}", flush=True)
    return rows


def answers_of(rows: Sequence[Row], name: str) -> list[Answered]:
    """A side's."""
    return [Answered(*row["answers"][name]) for row in rows]


def by_kind(rows: Sequence[Row], name: str, base: str = STOCK) -> dict[str, float]:
    """How much faster one side is than another, for each kind: geometric means over its prompts. Answers of one token
    have no speed and do not count."""
    out: dict[str, list[float]] = {}
    for row in rows:
        ours, theirs = (Answered(*row["answers"][which]) for which in (name, base))
        if min(ours.speed, theirs.speed) > 0:
            out.setdefault(row["kind"], []).append(ours.speed / theirs.speed)
    return {kind: geometric_mean(ratios) for kind, ratios in out.items()}


def differing(rows: Sequence[Row], name: str) -> int:
    """How many answers of a side are not those of our plain decoding."""
    return sum(a.tokens != b.tokens for a, b in zip(answers_of(rows, name), answers_of(rows, PLAIN)))


def table(measured: dict[str, list[Row]]) -> str:
    """Of all temperatures."""
    lines = []
    for temperature, rows in measured.items():
        kinds = list(dict.fromkeys(row["kind"] for row in rows))
        names = list(rows[0]["answers"])
        has_plain = PLAIN in names
        for name in names:
            differ = str(differing(rows, name)) if has_plain else ""
            if name == STOCK:
                speeds = [
                    middle(answers_of([row for row in rows if row["kind"] == kind], name), "speed") for kind in kinds
                ]
                lines.append([f"{name}, tokens/s", temperature, *(f"{one:.1f}" for one in speeds), "", "", differ])
            else:
                means = by_kind(rows, name)
                of_all = (geometric_mean(means.values()), min(means.values())) if means else (None, None)
                figures = [*(means.get(kind) for kind in kinds), *of_all]
                lines.append([name, temperature, *("" if one is None else f"{one:.2f}" for one in figures), differ])
    return markdown(["side", "temperature", *kinds, "mean", "least", "answers that differ from plain"], lines)


def main() -> None:
    parser = model_parser(__doc__, n=96)
    parser.add_argument("--per-kind", type=positive, default=2)
    parser.add_argument("--kinds", type=_kinds, help=f"of {', '.join(KINDS)}; all but summary-8k where none is named")
    parser.add_argument("--prompts", metavar="FILE", help="another set of prompts, JSONL")
    parser.add_argument(
        "--temperature", type=_temperatures, default="0", help="one or several, such as 0,0.7 (default 0)"
    )
    parser.add_argument(
        "--sides", type=sides.names, default=",".join(NAMES), help="of those of side.py; llama.cpp is one of them"
    )
    parser.add_argument("--head", metavar="FILE", help="a trained head's, for the sides lookup+head and auto+head")
    parser.add_argument("--n-ctx", type=positive, default=CONTEXT)
    add_record(parser)
    given = parser.parse_args()
    if STOCK not in given.sides:
        parser.error(f"{STOCK} must be among --sides: the others are compared with it.")
    machine = print_machine()
    if given.prompts is not None:
        prompts = _of_file(given.prompts, given.per_kind)
    else:
        prompts = pick(given.kinds or [k for k in KINDS if k != "summary-8k"], given.per_kind)
    measured = {
        f"{temperature:g}": ask(
            given.model, prompts, names=given.sides, n=given.n, temperature=temperature, n_ctx=given.n_ctx,
            threads=given.threads, head=given.head,
        )
        for temperature in given.temperature
    }  # fmt: skip
    record(given.record, machine, measured)
    print()
    print(table(measured))


def _kinds(text: str) -> list[str]:
    """For argparse."""
    found = text.split(",")
    for kind in found:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
    return found


def _temperatures(text: str) -> list[float]:
    """For argparse."""
    return [float(one) for one in text.split(",")]


def _of_file(path: str, per_kind: int) -> list[TaskPrompt]:
    """The first so many of each category."""
    out: list[TaskPrompt] = []
    for one in read_prompts(path):
        if sum(prompt.kind == one.category for prompt in out) < per_kind:
            out.append(TaskPrompt(one.id, one.category, False, [{"role": "user", "content": one.turns[0]}]))
    return out


if __name__ == "__main__":
    main()
