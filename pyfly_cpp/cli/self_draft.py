"""`pyfly-cpp models draft`: a draft of a model made of itself."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Any

import click

from pyfly_cpp.bench.self_draft import KINDS, PAYS, Found, Plan, Trial, make_draft, plan_draft
from pyfly_cpp.cli.loading import N_GPU_LAYERS_OPTION, N_THREADS_OPTION, reasons_from, silence
from pyfly_cpp.cli.terminal import Bar, ask_for, note
from pyfly_cpp.machine.memory import in_words
from pyfly_cpp.models.named import resolve_model


@click.command("draft", epilog="Example: pyfly-cpp models draft target.gguf")
@click.argument("target")
@click.option("--from", "source", metavar="MODEL", help="The same model in a better form (F16), to requantise.")
@click.option("-o", "--output", metavar="FILE", help="The draft to write.  [default: next to TARGET, by its type]")
@click.option("--types", default=",".join(KINDS), metavar="TYPE,...", help="Types to try.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before writing.")
@click.option("--keep", is_flag=True, help="Keep the best one even if it is not faster.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@N_GPU_LAYERS_OPTION
@N_THREADS_OPTION
def command(
    target: str,
    source: str | None,
    output: str | None,
    types: str,
    yes: bool,
    keep: bool,
    force: bool,
    as_json: bool,
    n_gpu_layers: int,
    n_threads: int | str,
) -> None:
    """Make a draft of TARGET by requantising it.

    The type is chosen by measuring on this machine: a draft of each type is made and timed on six bundled prompts, and
    the best one is kept if it helps. Close other programs first.
    """
    log = silence()
    kinds = [kind.strip().lower() for kind in types.split(",") if kind.strip()]
    model = None if source is None else resolve_model(source)
    plan = plan_draft(resolve_model(target), model, output, kinds, force)
    _ask(plan, yes)
    with Bar() as bar, reasons_from(log):
        found = make_draft(
            plan, keep=keep, on_progress=lambda what, done: bar.update(what, done, 1.0, f"{done:.0%}"),
            n_gpu_layers=n_gpu_layers, n_threads=n_threads, n_threads_batch=n_threads,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(_as_dict(found), indent=1))
    else:
        _show(plan, found)


def _ask(plan: Plan, yes: bool) -> None:
    names = ", ".join(kind.name for kind in plan.kinds)
    what = f"Up to {in_words(plan.n_bytes)} in {plan.folder} while {names} of {plan.source.name} are tried"
    if plan.is_quantised:
        note(
            f"{plan.source.name} is already quantised: a draft made from it loses quality twice. If you have the "
            "model as F16, --from that makes a better one."
        )
    ask_for(what, yes)


def _show(plan: Plan, found: Found) -> None:
    rows = [_row(trial) for trial in found.trials]
    head = ("type", "size", "ms a token", "right at depth 1, 2, ...", "best K", "tokens/s", "gain")
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    best = found.best
    click.echo(f"{plan.target.name} alone: {best.target_ms:.1f} ms a token, {1e3 / best.target_ms:.1f} tokens/s.")
    if found.path is None:
        click.echo(
            f"No draft is faster here: the best, {best.kind}, promises {best.gain:.2f}x. Nothing was kept (see --keep)."
        )
        return
    verdict = "helps" if best.gain >= PAYS else "does not help"
    click.echo(f"{best.kind} {verdict}: {best.gain:.2f}x is expected, with drafts of {best.draft_max}. Use it:")
    click.echo(f"  pyfly-cpp chat -m {shlex.quote(str(plan.target))} -d {shlex.quote(str(found.path))}")


def _row(trial: Trial) -> tuple[str, ...]:
    right = " ".join(f"{share:.2f}" for share in trial.acceptance) or "-"
    return (
        trial.kind, in_words(trial.n_bytes), f"{trial.draft_ms:.1f}", right, str(trial.draft_max), f"{trial.speed:.1f}",
        f"{trial.gain:.2f}x",
    )  # fmt: skip


def _as_dict(found: Found) -> dict[str, Any]:
    trials = [{**asdict(trial), "gain": trial.gain} for trial in found.trials]
    return {"path": None if found.path is None else str(found.path), "best": found.best.kind, "trials": trials}
