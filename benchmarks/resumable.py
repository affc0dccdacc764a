"""What windows.py and governor.py have in common: a results file that a run appends to, and the prompts.

The file is JSONL. Its first line says what every other line depends on (models, lengths); a run with other conditions
is refused. Files of the same conditions may be joined with cat. Every result is a line of its own, written whole and
flushed before the next generation begins, so a run can be stopped at any moment (or by --minutes) and started again: it
skips what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyfly_cpp import DraftModel, FlyLlama
from pyfly_cpp.bench.prompts import BenchPrompt, read_prompts
from pyfly_cpp.decoding.drafting import Drafters
from pyfly_cpp.evaluation.files import Row, field, read_jsonl, read_lines_so_far
from pyfly_cpp.evaluation.generation import Generator
from pyfly_cpp.evaluation.machine import describe_machine, disturbance
from pyfly_cpp.files import only_writer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a run."""
    parser.add_argument("--target", help="GGUF of the target")
    parser.add_argument("--draft", help="GGUF of the draft")
    parser.add_argument("--out", type=Path, required=True, help="results, JSONL; appended to")
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSONL files with `prompt` or `turns` (the first one)")
    parser.add_argument("--categories", nargs="+", help="only these categories (a file without any: its name)")
    parser.add_argument("--limit-per-category", type=int, help="at most so many prompts of a category")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th prompt, from the I-th on (from 0)")
    parser.add_argument("--max-prompt-tokens", type=int, help="longer prompts are left out and counted")
    parser.add_argument("--ctx", type=int, default=2048, help="context, tokens (default 2048)")
    parser.add_argument("--threads", type=int, help="threads (default: auto, all physical cores of an idle machine)")
    parser.add_argument("--minutes", type=float, help="end after the prompt during which so many minutes have passed")
    parser.add_argument("--table", action="store_true", help="print Markdown from --out; decode nothing")


def choose_prompts(args: argparse.Namespace) -> list[BenchPrompt]:
    """The prompts of all files, at most --limit-per-category of each: one of each category in turn, within a category
    one of each group in turn, so that a run that is cut short has measured some of everything."""
    paths, categories, limit = args.prompts, args.categories, args.limit_per_category
    first, step = (int(number) for number in args.shard.split("/"))
    prompts = []
    for path in paths:
        for prompt in read_questions(path):
            category = prompt.category or path.stem
            if categories is None or category in categories:
                prompts.append(BenchPrompt(prompt.id, category, prompt.turns, prompt.answer, prompt.group or prompt.id))
    if not prompts:
        raise SystemExit(f"there are no prompts of the categories {', '.join(categories or ())}.")
    of_group: Counter[tuple[str, str]] = Counter()
    ranked = []
    for prompt in prompts:
        ranked.append((of_group[prompt.category, prompt.group], prompt))
        of_group[prompt.category, prompt.group] += 1
    ranked.sort(key=lambda pair: pair[0])
    of_category: Counter[str] = Counter()
    chosen = []
    for _, prompt in ranked:
        if limit is None or of_category[prompt.category] < limit:
            chosen.append((of_category[prompt.category], prompt))
            of_category[prompt.category] += 1
    return [prompt for _, prompt in sorted(chosen, key=lambda pair: pair[0])][first::step]


def read_questions(path: Path) -> list[BenchPrompt]:
    """As read_prompts; rows with a `question` (the evaluation's data files) are asked that, with their `choices`."""
    rows = read_jsonl(path)
    if "question" not in rows[0][1]:
        return read_prompts(path)
    prompts = []
    for line, row in rows:
        lines = [field(path, line, row, "question")]
        lines += [f"{letter}) {text}" for letter, text in zip("ABCDE", row.get("choices") or ())]
        prompts.append(BenchPrompt(field(path, line, row, "id"), "", ("\n".join(lines),)))
    return prompts


def load(args: argparse.Namespace) -> Generator:
    """The target, and the draft if one is given."""
    threads = {} if args.threads is None else {"n_threads": args.threads, "n_threads_batch": args.threads}
    if (why := disturbance(describe_machine())) is not None:
        print(f"NOT IDLE: {why} The times are not to be believed.", file=sys.stderr)
    llm = FlyLlama(args.target, n_ctx=args.ctx, verbose=False, **threads)
    return Generator(llm, Drafters((DraftModel(args.draft, n_threads=args.threads),) if args.draft else ()))


class Results:
    """The lines of a results file, by what they are about."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read()

    def _read(self) -> None:
        lines, self._length = read_lines_so_far(self.path)
        conditions = [line["conditions"] for line in lines if "conditions" in line]
        self.conditions: Row = conditions[0] if conditions else {}
        if any(other != self.conditions for other in conditions):
            raise SystemExit(f"{self.path} holds results of different conditions, which do not belong into one table.")
        self.rows: list[Row] = [line for line in lines if "prompt" in line]
        self.left_out: list[Row] = [line for line in lines if "left_out" in line]

    @classmethod
    def measured(cls, path: Path) -> Results:
        """Those of a file that has some, for a table."""
        results = cls(path)
        if not results.rows:
            raise SystemExit(f"{path} has no results yet.")
        return results

    @contextlib.contextmanager
    def writing(self, conditions: Row) -> Iterator[None]:
        """Opens the file for `add`; refuses one of other conditions."""
        with only_writer(self.path.with_suffix(".lock")):
            self._read()  # another run may have added to it
            if self.conditions and self.conditions != conditions:
                raise SystemExit(
                    f"{self.path} holds results of {self.conditions}, not {conditions}; name another --out."
                )
            with open(self.path, "ab") as self._file:
                self._file.truncate(self._length)  # what a killed run left of its last line
                if not self.conditions:
                    self.conditions = conditions
                    self._write({"conditions": conditions})
                yield

    def add(self, row: Row) -> None:
        """Appends a result."""
        self._write(row)
        (self.rows if "prompt" in row else self.left_out).append(row)

    def _write(self, row: Row) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def model_conditions(args: argparse.Namespace) -> Row:
    """What makes two runs runs of the same models."""
    files = {"target": args.target, "draft": args.draft}
    return {name: f"{Path(file).name} ({Path(file).stat().st_size} bytes)" for name, file in files.items() if file}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column aligned to the left."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
