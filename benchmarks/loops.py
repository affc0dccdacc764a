"""Repetition loops: how often loose acceptance leads into one, what the loop guard does about it, and its false alarms.

    python benchmarks/loops.py run    --target MODEL --draft DRAFT --prompts FILE... --out loops.jsonl
    python benchmarks/loops.py alarms --target MODEL --prompts FILE... --out alarms.jsonl
    python benchmarks/loops.py texts  --target MODEL --prompts FILE...
    python benchmarks/loops.py run    --out loops.jsonl --table             # likewise alarms

A loop is what pyfly_cpp/evaluation/repetition.py calls a true loop: one unit of up to 64 tokens at least 4 times in a
row, over at least 32 tokens. Greedy, in the model's chat format, first turns only. A small model loops by itself at
temperature 0, so a loop is charged to loose acceptance (a "new" loop) where the exact output of the same prompt has
none. An output that has a true loop is not decoded any further.

run     every prompt exactly (plain decoding), then for every tau and drafter with the guard on and off (margin gate,
        reconverging window of 6). Where the guard did not act, the output without it is the same and is not decoded
        again; --verify-same N decodes N of them anyway and compares.
alarms  what the guard would see in Exact() output (decoded plainly), where it never acts: of the outputs in which it
        notices a loop, those without a true loop are false alarms. An output that ends at --tokens with a loop just
        noticed is followed a little further first.
texts   the same for texts that people wrote: every text field of the files (and .txt files by paragraph groups), in
        pieces of at most --tokens tokens of the model's vocabulary. No model is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp
from resumable import (
    Results,
    about,
    add_arguments,
    choose_prompts,
    load,
    markdown,
    model_conditions,
    rendered_prompts,
)

from pyfly_cpp._native import notice_loop
from pyfly_cpp.evaluation.files import Row, read_jsonl
from pyfly_cpp.evaluation.generation import Generated
from pyfly_cpp.evaluation.repetition import MAX_PERIOD, MIN_REPEATS, find_loop
from pyfly_cpp.evaluation.settings import EXACT, PLAIN, Setting, parse_setting
from pyfly_cpp.evaluation.statistics import flips, paired_difference, wilson

FOLLOWED = 192
"""Tokens behind the end of an output that are decoded where a loop was noticed and could not yet have become true."""

# ---- run -------------------------------------------------------------------------------------------------------------


def has_loop(tokens: Sequence[int]) -> bool:
    """Whether there is a true loop; looked for every 16 tokens, among those that one may just have come into."""
    return len(tokens) % 16 == 0 and find_loop(tokens[-MIN_REPEATS * (MAX_PERIOD + 16) :]) is not None


def outcome(generated: Generated) -> Row:
    """What became of one output."""
    loop = find_loop(generated.tokens)
    stats = generated.stats
    return {
        "n_tokens": len(generated.tokens),
        "finish": generated.finish,
        "loop": asdict(loop) if loop else None,
        "rounds": stats.rounds,
        "committed": stats.committed,
        "loose_accepted": stats.loose_accepted,
        "loops_cut": stats.loops,
        "rejected_loop": stats.rejected_loop,
    }


def run(args: argparse.Namespace) -> None:
    """Decodes every prompt exactly and loosely, with the guard and, where it acted, without."""
    prompts = choose_prompts(args)
    drafters = args.drafters or ["draft" if args.draft else "lookup"]
    loose = [parse_setting(f"margin:{tau:g} reconverge k={args.k} {name}") for name in drafters for tau in args.tau]
    results = Results(args.out)
    generator = load(args)
    generator.require(loose)
    with results.writing({**model_conditions(args), "tokens": args.tokens}):
        n_verified = sum(row.get("verified", False) for row in results.rows)
        done = {(row["setting"], row["prompt"], row["guard"]) for row in results.rows}
        wanted = [(str(EXACT), True), *((str(setting), guard) for setting in loose for guard in (True, False))]
        prompts = [p for p in prompts if any((name, p.id, guard) not in done for name, guard in wanted)]
        for prompt, rendered in rendered_prompts(generator, prompts, results, args):
            n_shared = generator.share_prefix([rendered])

            def decode(setting: Setting, guard: bool, n_keep: int = n_shared, rendered: Any = rendered) -> Generated:
                generator.llm.loop_guard = guard
                generator.forget(n_keep)
                return generator.generate(rendered, setting, args.tokens, is_enough=has_loop)

            if (str(EXACT), prompt.id, True) not in done:
                results.add({**about(prompt, rendered, EXACT), "guard": True, **outcome(decode(PLAIN, True))})
            for setting in loose:
                if (str(setting), prompt.id, False) in done:
                    continue  # the last of the two lines is there
                guarded = decode(setting, True)
                head = about(prompt, rendered, setting)
                if (str(setting), prompt.id, True) not in done:
                    results.add({**head, "guard": True, **outcome(guarded)})
                if guarded.stats.loops:
                    results.add({**head, "guard": False, **outcome(decode(setting, False))})
                    continue
                verifies = n_verified < args.verify_same
                if verifies and decode(setting, False).tokens != guarded.tokens:
                    raise SystemExit(f"{prompt.id}, {setting}: the guard did not act, but without it the text differs.")
                n_verified += verifies
                results.add({**head, "guard": False, **outcome(guarded), "same": True, "verified": verifies})


def share(hits: int, n: int) -> str:
    """`3/200, 1.5 % (0.5..4.3)`, by Wilson; more digits of small shares."""
    interval = wilson(hits, n)
    digits = 1 if interval.high > 0.01 else 3
    low, value, high = (f"{100 * x:.{digits}f}" for x in (interval.low, interval.estimate, interval.high))
    return f"{hits}/{n}, {value} % ({low}..{high})"


def print_run(results: Results) -> None:
    """Loop rates with and without the guard."""
    by: dict[tuple[str, bool], dict[str, Row]] = {}
    for row in results.rows:
        by.setdefault((row["setting"], row["guard"]), {})[row["prompt"]] = row
    exact = by.get((str(EXACT), True), {})
    n_verified = sum(row.get("verified", False) for row in results.rows)
    print(describe(results))
    print(f"\nExact() itself: loops in {share(sum(bool(row['loop']) for row in exact.values()), len(exact))}\n")
    table = []
    for setting in dict.fromkeys(row["setting"] for row in results.rows if row["setting"] != str(EXACT)):
        on, off = by.get((setting, True), {}), by.get((setting, False), {})
        ids = [name for name in exact if name in on and name in off]
        new = {
            guard: [bool(rows[i]["loop"]) and not exact[i]["loop"] for i in ids] for guard, rows in ((1, on), (0, off))
        }
        looped = {guard: [bool(rows[i]["loop"]) for i in ids] for guard, rows in ((1, on), (0, off))}
        difference = paired_difference(flips(new[0], new[1]))
        committed = sum(on[i]["committed"] for i in ids)
        table.append(
            [
                setting,
                f"{100 * sum(on[i]['loose_accepted'] for i in ids) / max(committed, 1):.1f} %",
                share(sum(looped[0]), len(ids)),
                share(sum(looped[1]), len(ids)),
                share(sum(new[0]), len(ids)),
                share(sum(new[1]), len(ids)),
                f"{100 * difference.estimate:+.1f} ({100 * difference.low:+.1f}..{100 * difference.high:+.1f})",
                f"{sum(on[i]['loops_cut'] > 0 for i in ids)} ({sum(on[i]['loops_cut'] for i in ids)})",
            ]
        )
    head = [
        "setting", "loose", "loops, guard off", "loops, guard on", "new loops, off", "new loops, on",
        "on - off, points", "prompts in which it acted (times)",
    ]  # fmt: skip
    print(markdown(head, table))
    print(
        f"\nIntervals: 95 %, Wilson; of the difference, paired (Agresti and Min). Outputs on which the guard did not "
        f"act were compared with those without it {n_verified} times: all equal."
    )


# ---- alarms ----------------------------------------------------------------------------------------------------------


def alarms(args: argparse.Namespace) -> None:
    """Decodes every prompt plainly and shows the output to the guard."""
    prompts = choose_prompts(args)
    results = Results(args.out)
    generator = load(args)
    with results.writing({**model_conditions(args), "tokens": args.tokens}):
        done = {row["prompt"] for row in results.rows}
        prompts = [prompt for prompt in prompts if prompt.id not in done]
        for prompt, rendered in rendered_prompts(generator, prompts, results, args):
            generated = generator.generate(rendered, PLAIN, args.tokens)
            noticed = notice_loop(generated.tokens)
            if noticed and generated.finish == "length" and find_loop(generated.tokens) is None:
                generated = generator.generate(rendered, PLAIN, args.tokens + FOLLOWED)  # will it come to a loop?
            row = {**about(prompt, rendered, EXACT), **outcome(generated), "noticed": noticed}
            results.add({**row, "output": generated.text} if noticed else row)


def print_alarms(results: Results) -> None:
    """How often the guard would have noticed a loop, and how often there was none."""
    print(describe(results))
    rows = []
    for name in [*dict.fromkeys(row["category"] for row in results.rows), None]:
        chosen = [row for row in results.rows if name in (None, row["category"])]
        noticed = [row for row in chosen if row["noticed"]]
        true = [row for row in noticed if row["loop"]]
        rows.append(
            [
                name or "all",
                str(len(chosen)),
                str(len(noticed)),
                str(sum(row["loop"]["at_end"] for row in true)),
                str(sum(not row["loop"]["at_end"] for row in true)),
                share(len(noticed) - len(true), len(chosen)),
                str(sum(bool(row["loop"]) and not row["noticed"] for row in chosen)),
            ]
        )
    print()
    head = ["prompts", "n", "noticed", "true loop to the end", "true loop, left again", "false alarms", "missed"]
    print(markdown(head, rows))
    for row in results.rows:
        if row["noticed"] and not row["loop"]:
            print(f"\nFalse alarm in {row['prompt']}, at token {row['noticed'][0]}:\n\n    {row['output'][-300:]!r}")


# ---- texts -----------------------------------------------------------------------------------------------------------


def texts_of(path: Path) -> Iterator[tuple[str, str]]:
    """(field, text) of everything that is text in a file."""
    if path.suffix != ".jsonl":
        for document in path.read_text(encoding="utf-8").split("\n\n\n"):
            yield "text", document
        return
    for _, row in read_jsonl(path):
        for name, value in row.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not name.endswith("id"):
                    yield name, text


def texts(args: argparse.Namespace) -> None:
    """Shows human-written texts to the guard."""
    vocabulary = llama_cpp.Llama(args.target, vocab_only=True, verbose=False)
    counts: dict[tuple[str, str], list[int]] = {}
    found = []
    for path in args.prompts:
        for name, text in texts_of(path):
            tokens = vocabulary.tokenize(text.encode("utf-8"), add_bos=False, special=False)
            for begin in range(0, len(tokens), args.tokens):
                piece = tokens[begin : begin + args.tokens]
                if len(piece) < args.min_tokens:
                    continue
                noticed = notice_loop(piece)
                count = counts.setdefault((path.name, name), [0, 0, 0])
                count[0] += 1
                if noticed:
                    loop = find_loop(piece)
                    count[1] += loop is not None
                    count[2] += loop is None
                    end = noticed[0] + 1
                    excerpt = vocabulary.detokenize(piece[max(0, end - 100) : end]).decode("utf-8", "replace")
                    found.append((path.name, name, loop, excerpt))
    rows = [[f"{file} {name}", str(n), str(true), str(no)] for (file, name), (n, true, no) in counts.items()]
    n, true, no = (sum(count[i] for count in counts.values()) for i in range(3))
    print(
        f"Pieces of {args.min_tokens} to {args.tokens} tokens of human-written text, vocabulary of "
        f"{Path(args.target).name}.\n"
    )
    print(markdown(["file and field", "pieces", "noticed, 4 repeats and more", "noticed, fewer"], rows))
    print(f"\nNoticed in {share(true + no, n)} of all pieces; {true} of them hold the unit 4 times and more.")
    for file, name, loop, excerpt in found[: args.show]:
        print(f"\n{file} {name} ({f'period {loop.period}, {loop.length} tokens' if loop else 'no true loop'}):")
        print(f"\n    {excerpt!r}")


# ---- Command line ----------------------------------------------------------------------------------------------------


def describe(results: Results) -> str:
    """Conditions in a line."""
    conditions = results.conditions
    n = len({row["prompt"] for row in results.rows})
    left_out = f"; {len(results.left_out)} left out as too long" if results.left_out else ""
    draft = f" with {conditions['draft']}" if "draft" in conditions else ""
    return f"{conditions['target']}{draft}, greedy, {n} prompts x up to {conditions['tokens']} tokens{left_out}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    loops_parser = commands.add_parser("run", help="loop rates with and without the guard")
    add_arguments(loops_parser)
    loops_parser.add_argument("--tokens", type=int, default=400, help="tokens for each prompt (default 400)")
    loops_parser.add_argument("--tau", type=float, nargs="+", default=[0.3, 0.4, 1.0], help="default 0.3 0.4 1.0")
    loops_parser.add_argument("--k", type=int, default=4, help="tokens drafted in a round (default 4)")
    loops_parser.add_argument("--drafters", nargs="+", choices=["draft", "lookup"], help="default: draft, if given")
    loops_parser.add_argument("--verify-same", type=int, default=0, metavar="N", help="see above (default 0)")
    alarms_parser = commands.add_parser("alarms", help="false alarms in Exact() output")
    add_arguments(alarms_parser)
    alarms_parser.add_argument("--tokens", type=int, default=256, help="tokens for each prompt (default 256)")
    texts_parser = commands.add_parser("texts", help="false alarms in texts")
    texts_parser.add_argument("--target", required=True, help="GGUF whose vocabulary is used")
    texts_parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSONL or text files")
    texts_parser.add_argument("--tokens", type=int, default=400, help="longest piece (default 400)")
    texts_parser.add_argument("--min-tokens", type=int, default=32, help="shorter ones are not counted (default 32)")
    texts_parser.add_argument("--show", type=int, default=20, help="excerpts to print (default 20)")
    args = parser.parse_args(arguments)
    if args.command == "texts":
        texts(args)
        return
    if args.table:
        (print_run if args.command == "run" else print_alarms)(Results.measured(args.out))
        return
    if not (args.target and args.prompts):
        parser.error("--target and --prompts are needed (or --table)")
    (run if args.command == "run" else alarms)(args)


if __name__ == "__main__":
    main()
