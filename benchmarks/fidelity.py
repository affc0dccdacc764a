"""What loose acceptance costs: records answers of every rule to the same items, and reads the records into a report.

    python benchmarks/fidelity.py record --target Q4_K_M --draft Q2_K --data FOLDER --records FOLDER \\
        --allow-code-execution --minutes 240
    python benchmarks/fidelity.py derive --records FOLDER --rules "all(margin:0.3,no-repeat:8)"
    python benchmarks/fidelity.py pack   --records FOLDER
    python benchmarks/fidelity.py report --records FOLDER --page benchmarks/fidelity.md \\
        --tables benchmarks/fidelity_tables.md --picture benchmarks/fidelity.png
    python benchmarks/fidelity.py check  --target Q4_K_M --data FOLDER --records FOLDER

`record` decodes what is missing, stage by stage (study/plan.py), and can be stopped at any moment and started again.
`derive` takes over, for a rule, the answers of wider ones in which it accepts the same (study/deriving.py). `pack`
compresses what was recorded. `report` writes the generated parts of the page and of its tables. `check` evaluates some
answers anew: what no loose accept chose has to be the target's choice. FOLDER of --data has the files that the plan
names. Counts do not depend on how busy the machine is, and no times are taken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from resumable import markdown, model_conditions
from study import plan
from study.comparing import Answers
from study.deriving import derive
from study.forcing import force, sample
from study.machines import DEFAULT, read_machines
from study.page import summary, update_page
from study.picture import draw
from study.recording import Progress, Recorder, n_missing
from study.records import Records, pack
from study.report import Report

from pyfly_cpp import DraftModel, FlyLlama
from pyfly_cpp.decoding.drafting import Drafters
from pyfly_cpp.decoding.gates import parse_gate
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.evaluation.drafting import load_batch
from pyfly_cpp.evaluation.files import DataError
from pyfly_cpp.evaluation.parallel import ParallelGenerator
from pyfly_cpp.evaluation.runner import require_permission


def record(args: argparse.Namespace) -> None:
    """Decodes what is missing."""
    limits = dict(read_limit(text) for text in args.limit)
    if not args.best and any(name.startswith("guards") for name in args.stages):
        raise DataError("which rules are to be guarded? give --best RULE RULE RULE.")
    all_stages = plan.stages(args.best, plan.ALL_RULES if args.rules == ["all"] else args.rules)
    chosen = [all_stages[name] for name in args.stages]
    parts = [name for name in plan.PARTS if any(name in stage.parts for stage in chosen)]
    parts = [name for name in parts if not args.parts or name in args.parts]
    for name in parts:
        require_permission(plan.PARTS[name].task, args.allow_code_execution)
    items = {name: plan.read_part(name, args.data, limits.get(name)) for name in parts}
    jobs = [job for stage in chosen for job in plan.work(stage, items)]
    records = Records(args.records)
    n = n_missing(jobs, records)
    print(f"{n} of {sum(len(ways) for _, _, ways in jobs)} answers are missing", file=sys.stderr)
    if n == 0 or args.dry_run:
        return
    settings = list(dict.fromkeys(way.setting for _, _, ways in jobs for way in ways))
    threads = {} if args.threads is None else {"n_threads": args.threads, "n_threads_batch": args.threads}
    drafters = Drafters((DraftModel(args.draft, n_threads=args.threads),))
    batch = load_batch(args.target, drafters, settings, args.parallel, n_ctx=args.ctx, verbose=False, **threads)
    generator = ParallelGenerator(batch, drafters)
    base = max(settings, key=lambda setting: (not setting.is_plain, setting.draft_max or 0))
    try:
        generator.require([setting for setting in settings if not setting.is_plain])
        limits_and_versions = {"llama_cpp_python": llama_cpp.__version__, "max_tokens": args.max_tokens}
        with records.writing({**model_conditions(args), **limits_and_versions}):
            recorder = Recorder(generator, records, base, max_tokens=args.max_tokens)
            n_new = recorder.run(jobs, Progress(args.minutes, n))
    finally:
        generator.close()
    for name, n_left_out in recorder.left_out.items():
        print(f"{n_left_out} items of {name} do not fit into {args.ctx} tokens; raise --ctx", file=sys.stderr)
    print(f"{n_new} answers recorded, {n - n_new} are missing; the same command goes on", file=sys.stderr)


def take_answers_over(args: argparse.Namespace) -> None:
    """Says for each rule what was added."""
    gates = [parse_gate(rule) for rule in args.rules]
    records = Records(args.records)
    if not records.rows:
        raise DataError(f"{args.records} has no answers to take over; name a folder that `record` has written.")
    with records.writing(records.conditions):
        for gate in gates:
            n_added, n_others = derive(records, gate)
            print(f"{gate}: {n_added} answers taken over; in {n_others} the wider rules accepted more: record those")


def make_report(args: argparse.Namespace) -> None:
    """Writes page, tables and picture."""
    report = Report(Records(args.records), read_machines(args.machines), args.least)
    for path, text in ((args.page, summary), (args.tables, Report.text)):
        if path is not None:
            update_page(path, text(report))
    if args.page is None and args.tables is None:
        print(f"{summary(report)}\n\n{report.text()}")
    if args.picture is not None:
        draw(report, args.picture)


def check(args: argparse.Namespace) -> None:
    """Teacher forcing: prints for each way how far its exact tokens are from the target's choice."""
    answers = Answers(Records(args.records), takes_all=True)
    ways = [plan.parse_way(text) for text in args.ways] or answers.ways
    parts = [part for part in answers.parts if not args.parts or part in args.parts]
    items = {(part, item.id): item for part in parts for item in plan.read_part(part, args.data)}
    llm = FlyLlama(args.target, n_ctx=args.ctx, logits_all=True, verbose=False)
    rows = []
    for way in ways:
        made = list(force(llm, sample(answers, way, items, args.n), items))
        gaps = np.concatenate([one.gaps for one in made] or [np.empty(0)])
        off = np.sort(gaps[gaps > 0])[::-1]
        cells = [f"{len(off)} ({100 * len(off) / max(1, len(gaps)):.2f} %)", ", ".join(f"{gap:.2f}" for gap in off[:3])]
        rows.append([way.title, f"{way.k or ''}", str(len(made)), str(len(gaps)), *cells])
        print(f"{way}: done", file=sys.stderr)
    head = ["rule", "drafts", "answers", "tokens no accept chose", "not the most probable", "largest gaps, logits"]
    print(markdown(head, rows))


def read_limit(text: str) -> tuple[str, int]:
    """A part and its number of items; raises SystemExit."""
    name, _, n = text.partition("=")
    if name not in plan.PARTS or not n.isdigit() or int(n) < 1:
        raise SystemExit(f"cannot read --limit {text}; write PART=N, with a part of {', '.join(plan.PARTS)}.")
    return name, int(n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="decode what is missing")
    one.add_argument("--target", required=True, help="GGUF of the target")
    one.add_argument("--draft", required=True, help="GGUF of the draft")
    one.add_argument("--data", type=Path, required=True, help="folder of the data files")
    one.add_argument("--records", type=Path, required=True, help="folder of the records; appended to")
    names = list(plan.stages())
    default = [name for name in names if name.startswith(("plain", "pooled", "rest"))]
    one.add_argument("--stages", nargs="+", choices=names, default=default, help=f"default: {' '.join(default)}")
    one.add_argument("--rules", nargs="+", default=plan.RULES, help="in place of the plan's; or: all")
    one.add_argument("--best", nargs="+", default=[], help="rules for the stages guards and again")
    one.add_argument("--parts", nargs="+", choices=list(plan.PARTS), help="only these parts of the stages")
    one.add_argument("--limit", nargs="+", default=[], metavar="PART=N", help="other numbers of items than the plan's")
    one.add_argument("--minutes", type=float, help="begin no item when so many minutes have passed")
    one.add_argument("--parallel", type=int, default=16, help="texts at once (default 16)")
    one.add_argument("--ctx", type=int, default=1280, help="tokens of one text, at most (default 1280)")
    one.add_argument("--max-tokens", type=int, help="shorten answers (to try things)")
    one.add_argument("--threads", type=int, help="threads (default: auto)")
    one.add_argument("--allow-code-execution", action="store_true", help="humaneval and mbpp run what the model writes")
    one.add_argument("--dry-run", action="store_true", help="say how much is missing, and decode nothing")
    two = commands.add_parser("pack", help="compress what was recorded")
    two.add_argument("--records", type=Path, required=True)
    three = commands.add_parser("report", help="read the records into a page")
    three.add_argument("--records", type=Path, required=True)
    three.add_argument("--page", type=Path, help="Markdown whose generated part is written: a line for each rule")
    three.add_argument("--tables", type=Path, help="the same for all tables (with neither, both are printed)")
    three.add_argument("--least", type=int, default=50, help="leave out rules with fewer items (default 50)")
    three.add_argument("--picture", type=Path, help="PNG of the frontier")
    three.add_argument("--machines", type=Path, default=DEFAULT, help="costs of batches, JSON (default: machines.json)")
    four = commands.add_parser("check", help="evaluate some answers anew (teacher forcing)")
    four.add_argument("--target", required=True, help="GGUF of the target")
    four.add_argument("--data", type=Path, required=True, help="folder of the data files")
    four.add_argument("--records", type=Path, required=True)
    four.add_argument("--ways", nargs="+", default=[], help='such as "exact k=8" plain (default: all)')
    four.add_argument("--parts", nargs="+", choices=list(plan.PARTS), help="only these parts")
    four.add_argument("-n", type=int, default=10, help="answers of a way (default 10)")
    four.add_argument("--ctx", type=int, default=1280, help="tokens of one text, at most (default 1280)")
    five = commands.add_parser("derive", help="take over answers of wider rules; report when the others are recorded")
    five.add_argument("--records", type=Path, required=True)
    five.add_argument("--rules", nargs="+", required=True, help="for which answers are taken over")
    args = parser.parse_args()
    try:
        if args.command == "record":
            record(args)
        elif args.command == "derive":
            take_answers_over(args)
        elif args.command == "check":
            check(args)
        elif args.command == "pack":
            print(pack(args.records) or "there is nothing to pack")
        else:
            make_report(args)
    except (PyflyError, ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None


if __name__ == "__main__":
    main()
