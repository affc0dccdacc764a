"""`pyfly-cpp bench`: how fast, on your machine, model and prompts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from pyfly_cpp.cli import describe
from pyfly_cpp.cli.headings import HeadedCommand, declares, more, number, thresholds
from pyfly_cpp.cli.kinds import FILE, PARALLEL_COUNTS, Int, Real, Written
from pyfly_cpp.cli.loading import MODEL_ARGUMENT, Models, model_options
from pyfly_cpp.cli.measuring import (
    Session,
    choose_settings,
    open_session,
    require_outputs,
    resume_if_interrupted,
    show_table,
)
from pyfly_cpp.cli.options import SAMPLING_OPTIONS
from pyfly_cpp.cli.progress import progress_bar
from pyfly_cpp.cli.terminal import note, write, write_sentences
from pyfly_cpp.decoding import AS_IN_CHAT, Decoding, written
from pyfly_cpp.decoding.gates import Gate
from pyfly_cpp.decoding.presets import Preset, save_preset
from pyfly_cpp.errors import counted
from pyfly_cpp.machine.files import sha256, write_atomically
from pyfly_cpp.machine.prompt_sets import BUILT_IN, BenchPrompt, pick_prompts, read_prompts
from pyfly_cpp.measure import report
from pyfly_cpp.measure.generator import Sampling
from pyfly_cpp.measure.journal import Journal, place
from pyfly_cpp.measure.load import summarise_loads
from pyfly_cpp.measure.plot import plot
from pyfly_cpp.measure.runner import measure, require_enough
from pyfly_cpp.measure.speed import Key, Measured, Memory, measure_memory, summarise
from pyfly_cpp.measure.statistics import MIN_GROUPS, for_json
from pyfly_cpp.measure.sweep import Point, fastest, make_preset, points_of, read_sweep

HELP = f"""Measure the speed of plain, exact and loose decoding on the same prompts.

\b
Example:
  pyfly-cpp bench -m target.gguf -d draft.gguf -s margin:0.3 -s entropy:0.3
  pyfly-cpp bench -m target.gguf -s "exact lookup" \\
      --prompts spec_bench.jsonl --limit 24 -o speed.json
  pyfly-cpp bench -m target.gguf --sweep margin:0.1,0.3,1 \\
      --least-agreement 0.9 --write-preset mine.json

{written("adaptive (the governor, as in chat),")}

Prompts: a .txt file with one on each line, or JSONL with `prompt` or `turns`, and optionally `category` (Spec-Bench's
format); by default, twelve built-in ones. With a --temperature, each prompt of each pass has its own seed, from --seed
on, the same for all settings. --sweep measures thresholds of one gate, and how much outputs differ from exact ones. It
chooses none: name one for the preset, or say how much of an answer may change. Each measurement is saved immediately:
run the same command (without --force) to resume. Speed is only half of the truth: `pyfly-cpp eval` measures the other
half. Close other programs first: a single busy one makes every number wrong."""


_OPTIONS = [
    click.option("-s", "--setting", "settings", multiple=True, metavar="TEXT",
                 help="A setting to measure; can be repeated."),
    thresholds("--sweep", "swept", type=Written("sweep", read_sweep), metavar="GATE[:X,X,...]",
               help="Also measure thresholds of one gate: margin, or margin:0.1,0.3,1."),
    number("--threshold", declare=thresholds, kind=Real(), help="The --sweep threshold that --write-preset writes."),
    number("--least-agreement", declare=thresholds, kind=Real(0, 1), help="Let --write-preset choose: the fastest "
           "threshold that agrees with exact this much and is clearly faster, if any."),
    thresholds("--write-preset", "preset_file", type=FILE, help="Write one threshold of --sweep as a preset."),
    more("--without-plain", is_flag=True, help="Leave out plain decoding."),
    click.option("--prompts", "prompt_file", type=FILE,
                 help="Prompts, .txt or JSONL.  [default: twelve built-in ones]"),
    number("--limit", kind=Int(1), help="Take N prompts, spread evenly over categories."),
    number("-n", "--max-tokens", kind=Int(2), default=128, help="Maximum answer length in tokens."),
    *SAMPLING_OPTIONS,
    number("--repeats", declare=more, kind=Int(1), default=1, help="Passes over the prompts."),
    number("--parallel", "counts", metavar="N,N,...", kind=PARALLEL_COUNTS, help="Measure throughput and latency with "
           "that many requests at a time, each of --n-ctx tokens, instead of one."),
    click.option("-o", "--output", type=FILE,
                 help="Write every measurement, with machine, versions and hashes, as JSON."),
    click.option("--details", is_flag=True, help="Also print where the time went, memory, acceptance by depth and "
                 "speed by category; with --parallel, latency."),
    more("--json", "as_json", is_flag=True, help="Print JSON instead of the tables."),
    more("--markdown", "markdown_file", type=FILE, help="Write all tables."),
    more("--plot", "plot_file", type=FILE, help="Write a PNG (needs matplotlib)."),
    more("--force", is_flag=True, help="Overwrite existing files, and start over."),
]  # fmt: skip


@click.command("bench", cls=HeadedCommand, help=HELP)
@MODEL_ARGUMENT
@declares(_OPTIONS)
@model_options
def command(
    settings: tuple[str, ...],
    swept: dict[float, Gate] | None,
    threshold: float | None,
    least_agreement: float | None,
    preset_file: str | None,
    without_plain: bool,
    prompt_file: str | None,
    limit: int | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    repeats: int,
    counts: tuple[int, ...] | None,
    output: str | None,
    details: bool,
    as_json: bool,
    markdown_file: str | None,
    plot_file: str | None,
    force: bool,
    models: Models,
) -> None:
    resume_if_interrupted(force)
    gates = swept or {}
    wanted = [*settings, *(str(Decoding(gate)) for gate in gates.values())]
    chosen = choose_settings(models, wanted, without_plain, [AS_IN_CHAT])
    path = Path(prompt_file) if prompt_file else BUILT_IN
    prompts = pick_prompts(read_prompts(path), limit)
    _require_choice(gates, threshold, least_agreement, preset_file, prompts)
    may_overwrite = require_outputs((output, markdown_file, preset_file), force, plot_file, path)
    if counts:
        if gates:
            raise ValueError("--sweep measures one request at a time; leave out --sweep or --parallel.")
        if plot_file:
            raise ValueError("--plot is for one request at a time; leave out --plot or --parallel.")
        require_enough(prompts, counts)
    outputs = (output, markdown_file, preset_file, plot_file)
    session = open_session(models, chosen, counts[-1] if counts else None, outputs)
    sampling = Sampling(temperature, seed)
    asked = {"prompts": [prompt.id for prompt in prompts], "prompt_file": sha256(path), "repeats": repeats,
             "settings": [str(s) for s in chosen], "max_tokens": max_tokens, "parallel": counts,
             **asdict(sampling)}  # fmt: skip
    journal = _open_journal(output, {**session.conditions(), **asked}, session.machine, prompts, force)
    known, keep = _keeping(journal, chosen)
    memory = {} if counts else measure_memory(session.generator, prompts[0], chosen)
    n_each = len(counts) * len(prompts) if counts else sum(len(prompt.turns) for prompt in prompts)
    with progress_bar("bench", n_each * repeats, len(chosen)) as progress:
        measured = measure(
            session.generator, prompts, chosen, max_tokens, repeats, progress, known, keep, sampling, counts
        )
    points = points_of(measured, gates.values()) if gates else []
    found = _several(measured, counts, prompts) if counts else _alone(measured, memory, str(AS_IN_CHAT), points)
    title = f"Speed of {models.model.name}"
    starts = (journal.machines if journal else []) or [session.machine]
    facts = [
        f"{counted(len(prompts), 'prompt')} of {path.name}, {counted(repeats, 'pass', 'passes')}, at most "
        f"{max_tokens} tokens, {sampling.described(len(prompts) * repeats)}",
        *found.facts,
        *session.facts(starts),
    ]
    record = {
        "format": 1,
        "machine": starts[0],
        "resumed": starts[1:],
        "models": session.models,
        "prompts": {"file": path.name, "sha256": sha256(path), "n": len(prompts)},
        "max_tokens": max_tokens,
        **asdict(sampling),
        "repeats": repeats,
        **found.record,
        "measured": [m.as_dict() for m in measured],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    try:
        if output:
            write_atomically(output, text)
        if markdown_file:
            write_atomically(
                markdown_file, report.page(title, facts, found.tables, f"{found.note}\n\n{found.verdict}".strip())
            )
        if plot_file:
            write_atomically(plot_file, plot(measured, title, points))
    finally:  # also where a file could not be written
        if as_json:
            write(text)
        else:
            for fact in facts:
                write_sentences(fact)
            for table in found.tables if details else found.tables[: found.n_first]:
                show_table("", *table)
            write_sentences(found.note)
            if found.verdict:
                write_sentences(f"\n{found.verdict}")
    if preset_file:
        chosen_gate = None if threshold is None else gates[threshold]
        preset = _preset(points, chosen_gate, least_agreement, facts, session, models)
        if preset is None:
            note(
                f"No threshold has an agreement of at least {least_agreement:g} and is clearly faster than exact: "
                f"{preset_file} is not written; use the default settings."
            )
        else:
            note(preset.claim["sentence"])
            save_preset(preset, preset_file, may_overwrite)
            note(f"Written to {preset_file}\nTo use it:\n  pyfly-cpp chat --preset {shlex.quote(preset_file)}")
    if journal is not None:
        journal.close()


def _require_choice(
    gates: Mapping[float, Gate],
    threshold: float | None,
    least_agreement: float | None,
    preset_file: str | None,
    prompts: Sequence[BenchPrompt],
) -> None:
    """Raises ValueError if it cannot be said, or could not be shown, which threshold a preset is to have."""
    if not preset_file:
        if threshold is not None or least_agreement is not None:
            raise ValueError("--threshold and --least-agreement are for --write-preset; give it a file.")
        return
    if not gates:
        raise ValueError("--write-preset writes a threshold of --sweep; add, for example, --sweep margin.")
    if (threshold is None) == (least_agreement is None):
        raise ValueError("--write-preset needs either --threshold or --least-agreement: no threshold is best for all.")
    if threshold is not None and threshold not in gates:
        known = ", ".join(f"{one:g}" for one in gates)
        raise ValueError(f"--threshold {threshold:g} is not among those of --sweep, which are {known}.")
    if least_agreement is not None and len({prompt.unit for prompt in prompts}) < MIN_GROUPS:
        raise ValueError(f"--least-agreement needs at least {MIN_GROUPS} prompts, better 8 to 16: fewer show nothing.")


def _preset(
    points: list[Point],
    gate: Gate | None,
    least_agreement: float | None,
    facts: list[str],
    session: Session,
    models: Models,
) -> Preset | None:
    """The preset of this gate or, if that is None, of the fastest threshold with so much agreement; None: there is no
    such threshold. Exact would be slower with a fixed number of drafts than by default."""
    if gate is not None:
        point = next(one for one in points if one.setting == str(Decoding(gate)))
        why = "as asked for"
    else:
        point = fastest(points, least_agreement or 0.0)
        if point is points[0]:
            return None
        why = f"the fastest with an agreement of at least {least_agreement:g} that is clearly faster than exact"
    sentence = (
        f"The preset is {point.setting}, {why}. "
        f"It was {report.interval(point.summary.speedup_exact)} times as fast as exact, with an agreement of "
        f"{report.interval(point.agreement)}. These are the prompts it was chosen on; others may give less."
    )
    claim = {
        "sentence": sentence,
        "facts": facts,
        "n_prompts": point.summary.n_prompts,
        "measured": {**for_json(point.summary), "agreement": for_json(point.agreement)},
        "machine": session.machine,
        "models": session.models,
    }
    return make_preset(Decoding.parse(point.setting), models.model, session.generator.drafters, claim)


def _open_journal(
    output: str | None, identity: dict[str, Any], machine: dict[str, Any], prompts: list[BenchPrompt], force: bool
) -> Journal | None:
    """Where measurements are kept, with those of an earlier start; None if they cannot be. Prints the place."""
    try:
        kept = place(output, identity)
        journal = Journal(kept, identity, machine, force)
        click.get_current_context().call_on_close(journal.release)
    except (OSError, RuntimeError) as error:
        note(f"(measurements are not kept: {describe(error)})")
        return None
    note(f"If it is interrupted, run the same command to resume. Progress is saved in {kept}")
    if journal.restore(prompts):
        note(f"{counted(len(journal.measured), 'measurement')} of an earlier start taken over")
    return journal


def _keeping(
    journal: Journal | None, settings: Sequence[Decoding]
) -> tuple[dict[Key, Measured], Callable[[Measured], None]]:
    """What earlier starts measured, and what keeps a measurement and, if stderr is no terminal, tells when a prompt
    is through."""
    measured: dict[Key, Measured] = {} if journal is None else journal.measured

    def keep(new: Measured) -> None:
        measured[new.key] = new
        if journal is not None:
            journal.add(new)
        row = [measured.get(replace(new, setting=str(setting)).key) for setting in settings]
        there = [one for one in row if one is not None]
        if len(there) == len(row) and not sys.stderr.isatty():
            names = report.bench_names(one.setting for one in there)
            speeds = "; ".join(f"{names[one.setting]} {one.tokens_per_second:.1f}" for one in there)
            n_parallel = f", {new.n_parallel} requests" if new.n_parallel > 1 else ""
            note(f"{new.prompt.id}{n_parallel}: {speeds} tokens/s")

    return dict(measured), keep


class Found(NamedTuple):
    """The result."""

    tables: list[report.Cells]
    n_first: int
    """How many of them are printed without --details."""
    note: str
    verdict: str
    """In one sentence; empty if nothing was compared with plain decoding."""
    facts: list[str]
    record: dict[str, Any]
    """Further fields of the JSON."""


def _alone(measured: list[Measured], memory: dict[str, Memory], chat: str, points: list[Point]) -> Found:
    record: dict[str, Any] = {
        "memory_mib": for_json(memory),
        "summaries": for_json(summarise(measured)),
        "by_category": {category: for_json(summarise(measured, category)) for category in report.categories(measured)},
    }
    verdict = report.verdict(summarise(measured), chat)
    (first, *others), swept, said = report.tables(measured, memory, chat), [], report.NOTE
    if points:
        record["sweep"] = for_json(points)
        swept = [report.sweep_cells(points)]
        said += f" {report.SWEEP_NOTE}"
    tables = [first, *swept, *others]
    return Found(tables, 1 + len(swept), said, verdict, [], {**record, "verdict": verdict})


def _several(measured: list[Measured], counts: tuple[int, ...], prompts: list[BenchPrompt]) -> Found:
    loads = summarise_loads(measured)
    facts = [f"{', '.join(map(str, counts))} requests at a time, in a context for {counts[-1]}"]
    if any(len(prompt.turns) > 1 for prompt in prompts):
        facts.append("of conversations, the first turn")
    tables = [report.throughput_cells(loads), report.latency_cells(loads)]
    return Found(tables, 1, report.PARALLEL_NOTE, "", facts, {"parallel": list(counts), "loads": for_json(loads)})
