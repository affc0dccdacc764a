"""`pyfly-cpp datastore`: texts of the user's own, indexed for the drafter `retrieval`."""

from __future__ import annotations

import json
import sys

import click

from pyfly_cpp.cli.loading import silence
from pyfly_cpp.cli.terminal import Bar, note
from pyfly_cpp.datastore import build_datastore, inspect_datastore
from pyfly_cpp.models import resolve_model


@click.group(
    "datastore",
    epilog="Example: pyfly-cpp datastore build target.gguf src/ notes.md -o mine.store && "
    "pyfly-cpp chat -m target.gguf --drafter retrieval -d mine.store",
)
def command() -> None:
    """Texts of your own, indexed: with --drafter retrieval, what followed the last words in them is drafted."""


@command.command(epilog="Example: pyfly-cpp datastore build target.gguf src/ notes.md -o mine.store")
@click.argument("model")
@click.argument("texts", nargs=-1, required=True, metavar="FILES...")
@click.option("-o", "--output", required=True, metavar="STORE", help="The datastore to write.")
@click.option("--force", is_flag=True, help="Overwrite it.")
def build(model: str, texts: tuple[str, ...], output: str, force: bool) -> None:
    """Index FILES (UTF-8 texts, and folders of them) for MODEL and every other model with its vocabulary."""
    silence()
    with Bar() as bar:

        def show(what: str, done: float, total: float) -> None:
            bar.update(what, done, total, f"{done / max(total, 1):.0%}")

        built = build_datastore(resolve_model(model), texts, output, force=force, on_progress=show)
    skipped = f"; {built.n_skipped} others are not UTF-8 text, or are empty" if built.n_skipped else ""
    note(f"{built.n_tokens} tokens of {built.n_files} texts ({built.n_bytes / 1e6:.1f} MB){skipped}")
    click.echo(output)


@command.command(epilog="Example: pyfly-cpp datastore show mine.store --model target.gguf")
@click.argument("store")
@click.option("-m", "--model", metavar="MODEL", help="Does it fit this model?")
@click.option("--check", is_flag=True, help="Read all of it, to see whether it is damaged.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(store: str, model: str | None, check: bool, as_json: bool) -> None:
    """Show what a datastore holds. Exit code 1 if it does not fit the model, or is damaged."""
    silence()
    found = inspect_datastore(store, None if model is None else resolve_model(model), check)
    if as_json:
        click.echo(json.dumps(found._asdict()))
    else:
        fits = {None: "", True: ", fits the model", False: ", does not fit the model: another vocabulary"}[found.fits]
        click.echo(
            f"{found.n_tokens} tokens of a vocabulary of {found.n_vocab}, {found.n_bytes / 1e6:.1f} MB"
            f"{', undamaged' if check else ''}{fits}"
        )
    if found.fits is False:
        sys.exit(1)
