"""Multi-level drafting (FLy): a draft model that checks prompt lookup while it drafts, against the same one without.

    python benchmarks/multi_level.py --model TARGET --draft DRAFT --data FOLDER [--per-kind 12] [-n 96] [--k 8,15,0]
        [--drafter draft|cross] [--no-speed] [--threads N] [--record FILE.json.gz]

Three kinds of prompts: an edit of a program (MBPP), code (HumanEval), a story (creative writing), --per-kind of each,
and -n tokens of each answer. Greedy and exact, with each number of drafts of --k in every step, and governed (`0`). The
ways take turns on four prompts at a time, in an order that is turned round each time; the draft model is loaded
between.

For each kind: the speed with lookup over that without it, paired, with a 95% interval over the prompts; both over
plain decoding; and how many batches and tokens the draft model evaluates for each token that it drafts, which no other
program disturbs (with --no-speed, these alone). Answers that differ from plain decoding's are counted. The files of
--data are those of study.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import add_record, llama_options, markdown, model_parser, print_machine, record
from study import PARTS, read_items

from pyfly_cpp import FlyLlama
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding
from pyfly_cpp.decoding.drafters import CrossVocabulary, DraftModel
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.measure.generator import Generator
from pyfly_cpp.measure.report import interval
from pyfly_cpp.measure.statistics import bootstrap, ratio, ratio_of_ratios
from pyfly_cpp.models.named import resolve_model

KINDS = {"edit": "mbpp", "code": "humaneval", "story": "writing"}
"""Parts of study.py."""
EDIT = (
    "Write this program again, with a docstring for each function and the variable names written out. Change nothing "
    "else, and answer with the program alone.\n\n"
)
AT_A_TIME = 4
GOVERNED = 0


def read_prompts(folder: Path, per_kind: int) -> list[tuple[str, str]]:
    """Kinds and questions, the kinds in turn."""
    found = []
    for kind, part in KINDS.items():
        task = PARTS[part][0]
        items = read_items(part, folder, {part: per_kind})
        asked = [EDIT + item.fields["code"] if kind == "edit" else task.question(item) for item in items]
        found.append([(kind, question) for question in asked])
    return [one for row in zip(*found) for one in row]


def settings_of(given: argparse.Namespace) -> list[tuple[str, int, Decoding]]:
    """Ways, numbers of drafts and settings; those of one drafter stand together."""
    out = [("plain", GOVERNED, PLAIN)]
    for way, lookup in (("without", False), ("with", True)):
        draft = DraftModel(given.draft, lookup=lookup)
        drafter = CrossVocabulary(draft) if given.drafter == "cross" else draft
        for k in given.k:
            how = {"adaptive": True} if k == GOVERNED else {"draft_max": k}
            out.append((way, k, replace(EXACT, drafter=drafter, **how)))
    return out


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each answer."""
    settings, prompts = settings_of(given), read_prompts(given.data, given.per_kind)
    llm = FlyLlama(given.model, n_ctx=2048, drafter=settings[-1][2].drafter, adaptive=True, **llama_options(given))
    generator = Generator(llm)
    with llm:
        for begin in range(0, len(prompts), AT_A_TIME):
            turned = settings if begin // AT_A_TIME % 2 == 0 else settings[::-1]
            for way, k, setting in turned:
                for i, (kind, question) in enumerate(prompts[begin : begin + AT_A_TIME], begin):
                    prompt = generator.render([{"role": "user", "content": question}])
                    generator.forget(0)
                    generator.configure(setting)
                    next(stream := llm.generate(list(prompt.tokens), temp=0.0))  # the draft model reads the prompt
                    stream.close()
                    natives = [] if way == "plain" else llm.loaded.decoder.drafters
                    before = [(one.n_batches, one.n_evaluated) for one in natives]
                    made = generator.generate(prompt, setting, given.n)
                    evaluated = [
                        (one.n_batches - n, one.n_evaluated - m) for one, (n, m) in zip(natives, before)
                    ] or [(0, 0)]  # fmt: skip
                    yield {
                        "prompt": i, "kind": kind, "way": way, "k": k, "tokens": list(made.tokens),
                        "decode_tokens": made.decode_tokens, "decode_seconds": made.decode_seconds,
                        "drafted": made.stats.drafted, "rounds": made.stats.rounds,
                        "batches": evaluated[0][0], "evaluated": evaluated[0][1],
                    }  # fmt: skip


def rows_of(lines: Sequence[dict[str, Any]], with_speed: bool) -> Iterator[list[str]]:
    """The table."""
    by = {(line["prompt"], line["way"], line["k"]): line for line in lines}
    ks = dict.fromkeys(line["k"] for line in lines if line["way"] == "with")
    for k in ks:
        for kind in (*KINDS, "all"):
            asked = [i for i, way, n in by if way == "with" and n == k and kind in (by[i, way, n]["kind"], "all")]
            pairs = [(by[i, "with", k], by[i, "without", k]) for i in asked]
            plain = [by[i, "plain", GOVERNED] for i in asked]

            def over(ones: Sequence[Any], others: Sequence[Any], what: tuple[str, str]) -> str:
                table = [[one[what[0]], one[what[1]], two[what[0]], two[what[1]]] for one, two in zip(ones, others)]
                return interval(bootstrap(table, ratio_of_ratios))

            with_, without = zip(*pairs)
            timed = ("decode_tokens", "decode_seconds")
            speeds = [over(with_, without, timed), over(with_, plain, timed), over(without, plain, timed)]
            counts = [
                interval(bootstrap([[one[what], max(one["drafted"], 0)] for one in side], ratio))
                for what in ("batches", "evaluated") for side in (with_, without)
            ]  # fmt: skip
            differing = sum(
                one["tokens"] != two["tokens"] for side in (with_, without) for one, two in zip(side, plain)
            )
            name = "governed" if k == GOVERNED else f"K = {k}"
            yield [kind, name, str(len(pairs)), *(speeds if with_speed else ()), *counts, str(differing)]


def main() -> None:
    parser = model_parser(__doc__, n=96)
    parser.add_argument("--draft", required=True, help="GGUF of the draft model")
    parser.add_argument("--drafter", choices=("draft", "cross"), default="draft", help="cross: of another vocabulary")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data files")
    parser.add_argument("--per-kind", type=int, default=12, help="prompts of each kind (default 12)")
    parser.add_argument("--k", default="8,15,0", help="drafts in each step, 0: governed (default 8,15,0)")
    parser.add_argument("--no-speed", action="store_true", help="print counts alone")
    add_record(parser)
    given = parser.parse_args()
    try:
        given.k = [int(text) for text in given.k.split(",")]
        given.model, given.draft = (resolve_model(path) for path in (given.model, given.draft))
        machine = print_machine()
        lines = list(measure(given))
    except (PyflyError, ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    speeds = () if given.no_speed else ("with, x without", "with, x plain", "without, x plain")
    counts = ("batches a drafted token, with", "without", "tokens evaluated, with", "without")
    head = ["kind", "drafts", "prompts", *speeds, *counts, "answers that differ from plain"]
    print(f"\n{markdown(head, rows_of(lines, not given.no_speed))}")
    record(given.record, machine, lines)


if __name__ == "__main__":
    main()
