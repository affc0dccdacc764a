"""`pyfly-cpp bench`: how fast, on your machine, model and prompts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from pyfly_cpp.bench import report
from pyfly_cpp.bench.journal import Journal, place
from pyfly_cpp.bench.measure import Key, Measured, measure, measure_memory, summarise
from pyfly_cpp.bench.parallel import measure_parallel, require_enough, summarise_loads
from pyfly_cpp.bench.prompts import BUILT_IN, BenchPrompt, pick_prompts, read_prompts
from pyfly_cpp.cli import describe, if_interrupted
from pyfly_cpp.cli.headings import HeadedCommand, declares, number
from pyfly_cpp.cli.kinds import PARALLEL_COUNTS, Int
from pyfly_cpp.cli.loading import Models, model_options
from pyfly_cpp.cli.measuring import Session, open_session, preset_settings, require_outputs, show_table
from pyfly_cpp.cli.progress import progress_bar
from pyfly_cpp.cli.terminal import note, write
from pyfly_cpp.decoding import EXACT, PLAIN, Decoding, parse_settings, short_names, written
from pyfly_cpp.errors import counted
from pyfly_cpp.evaluation.statistics import for_json
from pyfly_cpp.machine.files import sha256, write_atomically

HELP = f"""Measure the speed of plain, exact and loose decoding on the same prompts.

\b
Example:
  pyfly-cpp bench -m target.gguf -d draft.gguf -s margin:0.3 -s entropy:0.3
  pyfly-cpp bench -m target.gguf -s "exact lookup" \\
      --prompts spec_bench.jsonl --limit 24 -o speed.json

{written("adaptive (the governor, as in chat), ")}

Prompts: JSONL with `prompt` or `turns`, and optionally `category` (Spec-Bench's format); without --prompts, twelve
that come with it. What is measured is kept as it comes: if it is interrupted, the same command (without --force) goes
on where it stopped. Speed is only half of the truth: `pyfly-cpp eval` measures the other half. Close other programs
first: a single busy one makes every number wrong."""


_OPTIONS = [
    click.option("-s", "--setting", "settings", multiple=True, metavar="TEXT",
                 help="A setting to measure; can be repeated."),
    click.option("--without-plain", is_flag=True, help="Leave plain decoding out."),
    click.option("--prompts", "prompt_file", metavar="FILE",
                 help="Prompts, JSONL.  [default: twelve that come with it]"),
    number("--limit", kind=Int(1), help="Take N prompts, spread evenly over categories."),
    number("-n", "--max-tokens", kind=Int(2), default=128, help="Longest answer in tokens."),
    number("--repeats", kind=Int(1), default=1, help="Passes over the prompts."),
    number("--parallel", "counts", metavar="N,N,...", kind=PARALLEL_COUNTS, help="Measure throughput and latency with "
           "that many texts at once, each of --n-ctx tokens, instead of one alone."),
    click.option("-o", "--output", metavar="FILE",
                 help="Write every measurement, with machine, versions and hashes, as JSON."),
    click.option("--json", "as_json", is_flag=True, help="Print that, in place of the tables."),
    click.option("--markdown", "markdown_file", metavar="FILE", help="Write the tables."),
    click.option("--plot", "plot_file", metavar="FILE", help="Write a PNG (needs matplotlib)."),
    click.option("--force", is_flag=True, help="Overwrite files that exist, and start over."),
]  # fmt: skip


@click.command("bench", cls=HeadedCommand, help=HELP)
@declares(_OPTIONS)
@model_options
def command(
    settings: tuple[str, ...],
    without_plain: bool,
    prompt_file: str | None,
    limit: int | None,
    max_tokens: int,
    repeats: int,
    counts: tuple[int, ...] | None,
    output: str | None,
    as_json: bool,
    markdown_file: str | None,
    plot_file: str | None,
    force: bool,
    models: Models,
) -> None:
    if_interrupted(f"The same command{', without --force,' if force else ''} goes on from here.")
    first = (EXACT,) if without_plain else (PLAIN, EXACT)
    chosen = parse_settings(settings, (*first, *preset_settings(models)))
    path = Path(prompt_file) if prompt_file else BUILT_IN
    prompts = pick_prompts(read_prompts(path), limit)
    require_outputs((output, markdown_file), force, plot_file)
    if counts:
        if plot_file:
            raise ValueError("--plot shows one text alone; leave out --plot or --parallel.")
        require_enough(prompts, counts)
    session = open_session(models, chosen, counts[-1] if counts else None)
    machine = {name: session.machine[name] for name in ("cpu", "pyfly_cpp", "llama_cpp_python")}
    asked = {"prompts": [prompt.id for prompt in prompts], "prompt_file": sha256(path), "repeats": repeats,
             "settings": [str(s) for s in chosen], "max_tokens": max_tokens, "parallel": counts}  # fmt: skip
    journal = _open_journal(output, {**session.models, **machine, **asked}, prompts, force)
    what = Work(session, prompts, chosen, max_tokens, repeats, journal)
    found = _measure_parallel(what, counts) if counts else _measure(what)
    title = f"Speed of {models.model.name}"
    facts = [
        f"{counted(len(prompts), 'prompt')} of {path.name}, {counted(repeats, 'pass', 'passes')}, at most "
        f"{max_tokens} tokens, greedy",
        *found.facts,
        *session.facts(),
    ]
    record = {
        "format": 1,
        "machine": session.machine,
        "models": session.models,
        "prompts": {"file": path.name, "sha256": sha256(path), "n": len(prompts)},
        "max_tokens": max_tokens,
        "repeats": repeats,
        **found.record,
        "measured": [m.as_dict() for m in found.measured],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    try:
        if output:
            write_atomically(output, text)
        if markdown_file:
            write_atomically(markdown_file, report.page(title, facts, found.tables, found.note))
        if plot_file:
            write_atomically(plot_file, report.plot(found.measured, title))
    finally:  # also where a file could not be written
        if as_json:
            write(text)
        else:
            for fact in facts:
                write(fact + "\n")
            for table in found.tables:
                show_table("", *table)
            click.echo(found.note)
    if journal is not None:
        journal.close()


def _open_journal(
    output: str | None, identity: dict[str, Any], prompts: list[BenchPrompt], force: bool
) -> Journal | None:
    """Where measurements are kept, with those of an earlier start; None where they cannot be. Says where."""
    try:
        kept = place(output, identity)
        journal = Journal(kept, identity, force)
    except (OSError, RuntimeError) as error:
        note(f"(what is measured is not kept: {describe(error)})")
        return None
    note(f"kept in {kept} until it is done; interrupted, the same command goes on")
    if journal.restore(prompts):
        note(f"{counted(len(journal.measured), 'measurement')} of an earlier start taken over")
    return journal


@dataclass(frozen=True)
class Work:
    """What is to be measured."""

    session: Session
    prompts: list[BenchPrompt]
    settings: list[Decoding]
    max_tokens: int
    repeats: int
    journal: Journal | None

    def known(self) -> dict[Key, Measured]:
        """What earlier starts measured."""
        known = {} if self.journal is None else dict(self.journal.measured)
        for measured in known.values():
            self._count(measured)
        return known

    def keep(self, measured: Measured) -> None:
        """Keeps a measurement, and where stderr is no terminal tells when a prompt is through."""
        if self.journal is not None:
            self.journal.add(measured)
        if not sys.stderr.isatty():
            self._tell(measured)

    def _count(self, m: Measured) -> dict[str, float]:
        row = self.speeds.setdefault((m.prompt.id, m.turn, m.repeat, m.n_parallel), {})
        row[m.setting] = m.result.decode_tokens / m.result.decode_seconds if m.result.decode_seconds > 0 else 0.0
        return row

    def _tell(self, m: Measured) -> None:
        row = self._count(m)
        if len(row) == len(self.settings):
            names = short_names(row)
            speeds = ", ".join(f"{names[setting]} {speed:.1f}" for setting, speed in row.items())
            at_once = f", {m.n_parallel} at once" if m.n_parallel > 1 else ""
            note(f"{m.prompt.id}{at_once}: {speeds} tokens/s")

    speeds: dict[tuple[str, int, int, int], dict[str, float]] = field(default_factory=dict)
    """Tokens/s by setting of what was told or will be."""


@dataclass(frozen=True)
class Found:
    """What came of it."""

    measured: list[Measured]
    record: dict[str, Any]
    """What the JSON has besides."""
    tables: list[report.Cells]
    note: str
    facts: tuple[str, ...] = ()


def _measure(work: Work) -> Found:
    generator = work.session.generator
    memory = measure_memory(generator, work.prompts[0], work.settings)
    n_total = sum(len(prompt.turns) for prompt in work.prompts) * len(work.settings) * work.repeats
    with progress_bar(n_total, "bench", lines=False) as progress:
        measured = measure(
            generator, work.prompts, work.settings, work.max_tokens, work.repeats, progress, work.known(), work.keep
        )
    record = {
        "memory_mib": {setting: asdict(size) for setting, size in memory.items()},
        "summaries": for_json(summarise(measured)),
        "by_category": {category: for_json(summarise(measured, category)) for category in report.categories(measured)},
    }
    return Found(measured, record, report.tables(measured, memory), report.NOTE)


def _measure_parallel(work: Work, counts: tuple[int, ...]) -> Found:
    n_total = len(work.prompts) * len(work.settings) * len(counts) * work.repeats
    with progress_bar(n_total, "bench", lines=False) as progress:
        measured = measure_parallel(
            work.session.generator, work.prompts, work.settings, counts, work.max_tokens, work.repeats, progress,
            work.known(), work.keep,
        )  # fmt: skip
    loads = summarise_loads(measured)
    tables = [report.throughput_cells(loads), report.latency_cells(loads)]
    numbers = ", ".join(map(str, counts))
    facts = [f"{numbers} texts at once, in a context for {counts[-1]}"]
    if any(len(prompt.turns) > 1 for prompt in work.prompts):
        facts.append("of conversations, the first turn")
    record = {"parallel": list(counts), "loads": for_json(loads)}
    return Found(measured, record, tables, report.PARALLEL_NOTE, tuple(facts))
