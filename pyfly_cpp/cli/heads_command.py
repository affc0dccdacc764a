"""`pyfly-cpp heads`: train a head for a model."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict

import click

from pyfly_cpp.cli import if_interrupted
from pyfly_cpp.cli.hints import HintingGroup
from pyfly_cpp.cli.kinds import FILE, MODEL
from pyfly_cpp.cli.loading import N_THREADS_OPTION, silence
from pyfly_cpp.cli.terminal import Bar, ask_for, note
from pyfly_cpp.heads import Trained, TrainingPlan, plan_head, train_head
from pyfly_cpp.heads.plan import KINDS
from pyfly_cpp.machine.memory import in_words
from pyfly_cpp.models.named import resolve_model


@click.group("heads", cls=HintingGroup, short_help="Train a head that drafts for a model.")
def command() -> None:
    """Heads: small models that read the target's hidden states and draft for it (docs/training-heads.md)."""


@command.command("train", epilog="Example: pyfly-cpp heads train target.gguf -o head.gguf")
@click.argument("target", type=MODEL)
@click.option("-o", "--output", required=True, type=FILE, help="The head to write.")
@click.option("--texts", metavar="PATH", type=FILE, help="Texts to learn from.  [default: answers of TARGET]")
@click.option("--prompts", type=FILE, help="JSON Lines that TARGET answers.  [default: built-in and made up]")
@click.option("--tokens", "n_tokens", default=200_000, metavar="N", help="Learn from at most N tokens.")
@click.option("--hours", default=3.0, metavar="H", help="Spend at most H hours on all steps.")
@click.option("--type", "kind", default="q8_0", type=click.Choice(KINDS), help="Type of the head's matrices.")
@click.option("--licence", metavar="NAME", help="Licence of the texts, noted in the file.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before starting.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@N_THREADS_OPTION
def train(
    target: str,
    output: str,
    texts: str | None,
    prompts: str | None,
    n_tokens: int,
    hours: float,
    kind: str,
    licence: str | None,
    yes: bool,
    force: bool,
    as_json: bool,
    n_threads: int | str,
) -> None:
    """Train a head for the GGUF model TARGET on texts.

    Run the same command again to resume after an interruption. You can use the output after the
    first pass.
    """
    silence()
    plan = plan_head(
        resolve_model(target), output, texts=texts, prompts=prompts, n_tokens=n_tokens, hours=hours, kind=kind,
        licence=licence, force=force,
    )  # fmt: skip
    _ask(plan, yes)
    if_interrupted("Progress is saved; run the same command to resume.")
    with Bar() as bar:
        found = train_head(
            plan, tell=lambda what, done: bar.update(what, done, 1.0, f"{done:.0%}"), log=note,
            n_threads=n_threads, n_threads_batch=n_threads,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps({**asdict(found), "path": str(found.path)}, indent=1))
    else:
        _show(plan, found)


def _ask(plan: TrainingPlan, yes: bool) -> None:
    texts = "its answers to prompts" if plan.texts is None else str(plan.texts)
    what = (
        f"Up to {plan.hours:g} hours, {in_words(plan.n_bytes_disk)} in {plan.folder} and about "
        f"{in_words(plan.n_bytes_memory)} of memory, to learn from {plan.n_tokens} tokens of {texts}"
    )
    ask_for(what, yes)


def _advice(plan: TrainingPlan) -> str:
    """What to do with a head that is not worth it, if it would be used by default: it is next to its target."""
    output, folder = plan.output.resolve(), plan.target.resolve().parent
    if output.parent != folder:
        return ""
    return f": move {output.name} away from {folder}, where it would be used by default"


def _show(plan: TrainingPlan, found: Trained) -> None:
    for kind, shares in sorted(found.by_kind.items()):
        right = " ".join(f"{share:.2f}" for share in shares)
        click.echo(f"{kind}: right at depth 1, 2, 3: {right}; {1 + sum(shares):.2f} tokens per step")
    if found.speeds is not None:
        speeds, share = found.speeds, found.speeds.with_head / found.speeds.without_head
        click.echo(
            f"{speeds.plain:.1f} tokens/s without drafts, {speeds.without_head:.1f} with what drafts by default, "
            f"{speeds.with_head:.1f} with prompt lookup and the head ({share:.2f}x of the default)."
        )
        if not speeds.is_worth_it:
            click.echo(f"The head is not worth it here{_advice(plan)}.")
            return
    target, head = shlex.quote(str(plan.target)), shlex.quote(str(found.path))
    click.echo(f"Use it:\n  pyfly-cpp chat -m {target} --drafter lookup+eagle3 -d {head}")
