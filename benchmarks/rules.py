"""Every rule on code, maths and stories: what it gains, what it gives away, and what becomes of the answers.

    python benchmarks/rules.py --target Q4_K_M --draft Q2_K --prompts humaneval.jsonl gsm8k.jsonl stories.jsonl --out rules.jsonl
    python benchmarks/rules.py --out rules.jsonl --table > benchmarks/rules.md

The rules are those of the table in pyfly_cpp/rules/written.py, each as in its example; guards restrict margin:0.3.
Greedy, in the model's chat format. What a file holds says its rows: programs with tests (`entry_point`), sums with an
answer (`answer_number`), else stories. All rules take one prompt after the other, each from the same cache, so speeds
are of one run; `--counts` takes no times, for a machine that is busy. See resumable.py for the results file.
"""  # noqa: E501 - a command

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from resumable import (
    Results,
    about,
    add_arguments,
    choose_prompts,
    decoded,
    load,
    markdown,
    model_conditions,
)

from pyfly_cpp import FlyLlama
from pyfly_cpp.evaluation.files import Row, read_jsonl
from pyfly_cpp.evaluation.gsm8k import Gsm8k
from pyfly_cpp.evaluation.humaneval import HumanEval
from pyfly_cpp.evaluation.sandbox import SandboxError
from pyfly_cpp.evaluation.settings import parse_setting
from pyfly_cpp.evaluation.task import Item, Task
from pyfly_cpp.rules import FORMS, regions_of
from pyfly_cpp.rules.guards import Guard

KINDS = {"code": "entry_point", "math": "answer_number", "story": "prompt"}
"""A kind, and the field by which its rows are known; the first that is there counts."""
COUNTERS = ("rounds", "drafted", "committed", "matched", "loose_accepted")


def all_rules() -> Iterator[str]:
    """Every rule as it is written in its example."""
    for form in FORMS:
        example = form.example or f"{form.word}:0.1"
        if issubclass(form.rule, Guard):
            yield f"all(margin:0.3,{example})"
        elif "..." not in example:
            yield example


def run(args: argparse.Namespace) -> None:
    """Decodes every prompt with every rule, or what is left of it."""
    settings = [replace(parse_setting(text), draft_max=args.k) for text in args.rules]
    kinds, items = read_tasks(args.prompts)
    prompts = choose_prompts(args)
    results = Results(args.out)
    conditions = {**model_conditions(args), "tokens": args.tokens, "k": args.k, "times": not args.counts}
    generator = load(args)
    generator.require(settings)
    with results.writing(conditions):
        for prompt, rendered, setting, generated in decoded(generator, prompts, settings, results, args):
            times = {"seconds": generated.decode_seconds, "timed": generated.decode_tokens}
            results.add(
                {
                    **about(prompt, rendered, setting),
                    "category": kinds[prompt.category],
                    **{name: getattr(generated.stats, name) for name in COUNTERS},
                    **({} if args.counts else times),
                    **parts_of(generator.llm, rendered.tokens, generated.tokens),
                    "loose_in": dict(generated.stats.loose_by_region),
                    "right": is_right(*items[prompt.id], generated.text, generated.tokens),
                    "finish": generated.finish,
                    "answer": generated.tokens,
                }
            )


def read_tasks(paths: Sequence[Path]) -> tuple[dict[str, str], dict[str, tuple[Task | None, Item | None]]]:
    """The kinds of files by their stems, and the items that can be judged by their ids."""
    kinds: dict[str, str] = {}
    items: dict[str, tuple[Task | None, Item | None]] = {}
    tasks: dict[str, Task] = {"code": HumanEval(), "math": Gsm8k()}
    for path in paths:
        rows = read_jsonl(path)
        kinds[path.stem] = kind = next(kind for kind, name in KINDS.items() if name in rows[0][1])
        if kind in tasks:
            items.update({item.id: (tasks[kind], item) for item in tasks[kind].read(path)})
        else:
            items.update({str(row["id"]): (None, None) for _, row in rows})
    return kinds, items


def parts_of(llm: FlyLlama, prompt: Sequence[int], tokens: Sequence[int]) -> Row:
    """The code and the numbers of an answer."""
    pieces = [llm.detokenize([token], special=True) for token in (*prompt, *tokens)]
    control = [i for i, token in enumerate(prompt) if not llm.detokenize([token])]
    regions = list(zip(regions_of(pieces, control), pieces))[len(prompt) :]
    out = {"code": b"", "numbers": b""}
    for region, piece in regions:
        if region in out:
            out[region] += piece
    return {name: text.decode("utf-8", "replace") for name, text in out.items()}


def is_right(task: Task | None, item: Item | None, text: str, tokens: Sequence[int]) -> bool | None:
    """Whether the answer is right; None where nobody can tell."""
    if task is None or item is None:
        return None
    if task.runs_code:
        block = re.search(r"```\w*\n(.*?)(```|\Z)", text, re.S)
        text = "\n" + (block[1] if block else text)
    try:
        return task.score(item, text, tokens).correct
    except SandboxError as error:
        print(f"programs are not judged: {error}", file=sys.stderr)
        return None


# ---- Tables ----------------------------------------------------------------------------------------------------------


class Compared:
    """The answers of one rule to prompts of one kind, with exact's."""

    def __init__(self, rows: Sequence[Row], exact: dict[str, Row]) -> None:
        self.rows = [row for row in rows if row["prompt"] in exact]
        self._exact = exact

    def share(self, of: Callable[[Row, Row], float], to: Callable[[Row, Row], float] = lambda row, exact: 1) -> str:
        """A ratio of sums over prompts, of what a rule's row and exact's say; in percent."""
        pairs = [(row, self._exact[row["prompt"]]) for row in self.rows]
        n = sum(to(*pair) for pair in pairs)
        return f"{100 * sum(of(*pair) for pair in pairs) / n:.1f} %" if n else "-"

    def sum(self, name: str, of_exact: bool = False) -> float:
        """Of a number over all prompts."""
        return sum((self._exact[row["prompt"]] if of_exact else row)[name] for row in self.rows)

    def speed(self) -> str:
        """Tokens a second relative to exact's."""
        if "seconds" not in self.rows[0]:
            return "not measured yet"
        mine, exact = (self.sum("timed", e) / self.sum("seconds", e) for e in (False, True))
        return f"{mine / exact:.2f}"

    def cells(self, part: str | None) -> list[str]:
        """A line of a table; `part`: of the answers, compared, too."""
        judged = [row["right"] for row in self.rows if row["right"] is not None]
        return [
            f"{self.sum('committed') / self.sum('rounds'):.2f}",
            f"{100 * self.sum('loose_accepted') / self.sum('committed'):.1f} %",
            self.share(n_equal, lambda row, exact: max(len(row["answer"]), len(exact["answer"]))),
            self.share(lambda row, exact: row["answer"] == exact["answer"]),
            "-" if part is None else self.share(lambda row, exact: row[part] == exact[part]),
            f"{sum(judged)} of {len(judged)}" if judged else "-",
            f"{sum(len(row['answer']) for row in self.rows) / len(self.rows):.0f}",
            self.speed(),
        ]


def n_equal(row: Row, exact: Row) -> int:
    """How many leading tokens are exact's."""
    a, b = row["answer"], exact["answer"]
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


HEAD = (
    "rule",
    "tokens a round",
    "loose",
    "leading tokens as exact's",
    "answers as exact's",
    "same code or numbers",
    "right",
    "tokens an answer",
    "speed / exact's",
)
PARTS = {"code": "code", "math": "numbers"}


def print_table(path: Path) -> None:
    """Markdown of a results file, by kind of prompt."""
    results = Results.measured(path)
    conditions = results.conditions
    print(
        f"# Rules compared\n\nMade by `rules.py`. {conditions['target']} with "
        f"{conditions.get('draft', 'prompt lookup')}, greedy, {conditions['k']} drafts a round, answers of at most "
        f"{conditions['tokens']} tokens.\n\n"
        "Loose: of all tokens, those that are not the target's choice. Leading tokens as exact's: those before the\n"
        "first that differs, of the longer answer's. Same code or numbers: answers whose code (code) or numbers\n"
        "(math) are exact's to the letter, wherever they stand. Right: the tests pass, the last number is the answer."
    )
    for kind in KINDS:
        of_kind = [row for row in results.rows if row["category"] == kind]
        exact = {row["prompt"]: row for row in of_kind if parse_setting(row["setting"]).is_exact}
        settings = list(dict.fromkeys(row["setting"] for row in of_kind))
        if not exact:
            continue
        print(f"\n## {kind} ({len(exact)} prompts)\n")
        lines = []
        for setting in settings:
            compared = Compared([row for row in of_kind if row["setting"] == setting], exact)
            missing = len(exact) - len(compared.rows)
            name = str(parse_setting(setting).gate) + (f" ({missing} missing)" if missing else "")
            if compared.rows:
                lines.append([f"`{name}`" if not missing else name, *compared.cells(PARTS.get(kind))])
        print(markdown(HEAD, lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer, at most (default 256)")
    parser.add_argument("--k", type=int, default=8, help="draft length (default 8)")
    parser.add_argument("--counts", action="store_true", help="take no times")
    parser.add_argument("--rules", nargs="+", default=list(all_rules()), help="as on the command line (default: all)")
    args = parser.parse_args()
    if args.table:
        print_table(args.out)
        return
    if not (args.target and args.prompts):
        parser.error("--target and --prompts are needed (or --table)")
    if not any(parse_setting(rule).is_exact for rule in args.rules):
        args.rules.insert(0, "exact")
    run(args)


if __name__ == "__main__":
    main()
