"""`pyfly-cpp bench`: how fast, on your machine, model and prompts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from pyfly_cpp.bench import report
from pyfly_cpp.bench.measure import measure, measure_memory, summarise
from pyfly_cpp.bench.prompts import BUILT_IN, pick_prompts, read_prompts
from pyfly_cpp.cli.measuring import (
    Models,
    model_options,
    one_sentence_errors,
    progress_bar,
    require_outputs,
    show_table,
)
from pyfly_cpp.cli.terminal import write
from pyfly_cpp.evaluation.settings import EXACT, PLAIN, parse_settings, written
from pyfly_cpp.files import sha256, write_atomically

HELP = f"""Measures the speed of plain, exact and loose decoding on the same prompts.

\b
Example:
  pyfly-cpp bench -m target.gguf -d draft.gguf -s margin:0.3 -s entropy:0.3
  pyfly-cpp bench -m target.gguf -s "exact lookup" --prompts spec_bench.jsonl --limit 24 --json a.json --plot a.png

{written("adaptive (the governor, as in chat), ")}
Prompts: JSONL with `prompt` or `turns`, and `category` if you like (Spec-Bench's format);
without --prompts, twelve of our own. Speed alone is half of the truth: `pyfly-cpp eval` measures the other half.
Close other programs first: one busy neighbour makes every number wrong."""


@click.command("bench", help=HELP)
@click.option(
    "--setting", "-s", "settings", multiple=True, metavar="TEXT", help="A setting to measure; can be repeated."
)
@click.option("--without-plain", is_flag=True, help="Leave plain decoding out.")
@click.option("--prompts", "prompt_file", metavar="FILE", help="Prompts, JSONL.  [default: twelve of our own]")
@click.option("--limit", type=click.IntRange(1), help="Take N prompts, evenly over the categories.")
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Longest answer, tokens.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Passes over the prompts.")
@click.option("--json", "json_file", metavar="FILE", help="Write every measurement, with machine, versions and hashes.")
@click.option("--markdown", "markdown_file", metavar="FILE", help="Write the tables.")
@click.option("--plot", "plot_file", metavar="FILE", help="Write a PNG (needs matplotlib).")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@model_options
def command(
    settings: tuple[str, ...],
    without_plain: bool,
    prompt_file: str | None,
    limit: int | None,
    max_tokens: int,
    repeats: int,
    json_file: str | None,
    markdown_file: str | None,
    plot_file: str | None,
    force: bool,
    models: Models,
) -> None:
    """See HELP."""
    with one_sentence_errors("Nothing was written."):
        first = (EXACT,) if without_plain else (PLAIN, EXACT)
        chosen = parse_settings(settings, (*first, *models.settings))
        path = Path(prompt_file) if prompt_file else BUILT_IN
        prompts = pick_prompts(read_prompts(path), limit)
        require_outputs((json_file, markdown_file), force, plot_file)
        session = models.open(chosen)
        generator = session.generator
        memory = measure_memory(generator, prompts[0], chosen)
        n_total = sum(len(prompt.turns) for prompt in prompts) * len(chosen) * repeats
        with progress_bar(n_total, "bench") as progress:
            measured = measure(generator, prompts, chosen, max_tokens, repeats, progress)
        summaries = summarise(measured)
        title = f"Speed of {Path(models.model).name}"
        facts = [
            f"{len(prompts)} prompts of {path.name}, {repeats} passes, at most {max_tokens} tokens, greedy",
            *session.facts(),
        ]
        try:
            if json_file:
                record = {
                    "format": 1,
                    "machine": session.machine,
                    "models": session.models,
                    "prompts": {"file": path.name, "sha256": sha256(path), "n": len(prompts)},
                    "max_tokens": max_tokens,
                    "repeats": repeats,
                    "memory_mib": {setting: asdict(size) for setting, size in memory.items()},
                    "summaries": [s.as_dict() for s in summaries],
                    "by_category": {
                        category: [s.as_dict() for s in summarise(measured, category)]
                        for category in report.categories(measured)
                    },
                    "measured": [m.as_dict() for m in measured],
                }
                write_atomically(json_file, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
            if markdown_file:
                write_atomically(markdown_file, report.markdown(title, facts, measured, memory))
            if plot_file:
                write_atomically(plot_file, report.plot(measured, title))
        finally:  # also where a file could not be written
            for fact in facts:
                write(fact + "\n")
            show_table("", *report.speed_cells(summaries))
            show_table("", *report.time_cells(summaries, memory))
            if report.categories(measured):
                show_table("", *report.category_cells(measured))
            click.echo(report.NOTE)
