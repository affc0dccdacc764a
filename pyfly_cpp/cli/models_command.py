"""`pyfly-cpp models`: list, fetch, path, pair, remove, and draft (self_draft.py)."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pyfly_cpp.cli.hints import HintingGroup
from pyfly_cpp.cli.kinds import MODEL, Written
from pyfly_cpp.cli.offering import fetch_with_bar
from pyfly_cpp.cli.self_draft import DEFAULT_TYPE, can_draft_for_itself
from pyfly_cpp.cli.self_draft import command as draft
from pyfly_cpp.cli.terminal import ask_for, note, write
from pyfly_cpp.decoding.companions import MOST_SHARE, companions
from pyfly_cpp.decoding.resolve import has_mtp_head
from pyfly_cpp.machine.cache import kept_here
from pyfly_cpp.machine.memory import bytes_of_model, in_words
from pyfly_cpp.models import hub
from pyfly_cpp.models import named as models
from pyfly_cpp.models.here import models_here
from pyfly_cpp.models.pairs import PAIRS, Offer, Pair, offers, published_pair
from pyfly_cpp.models.removing import removable, removable_names, remove


@click.group(
    "models",
    cls=HintingGroup,
    short_help="List, fetch, pair and remove models.",
    epilog="Example: pyfly-cpp models fetch hf:Qwen/Qwen3-0.6B-GGUF:Q8_0",
)
def command() -> None:
    """Models by name, for --model and --draft.

    \b
    hf:OWNER/REPO:TYPE  a model of the hub, by its type (Q4_K_M, Q8_0, ...)
    hf:OWNER/REPO       the same, of a common type
    hf:OWNER/REPO/FILE  a GGUF file of the hub
    ollama:NAME:TAG     a model that Ollama has pulled
    NAME                NAME.gguf in $PYFLY_MODELS, or in the user's cache folder
    smollm2-135m        the demo model
    """


@command.command("list", epilog="Example: pyfly-cpp models list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """List the models on this machine, and what else this program keeps.

    Looks into the folders of this program, the hub, llama.cpp, LM Studio and Ollama.
    """
    found, kept = models_here(), kept_here()
    if as_json:
        rows = [{"kind": "model", **one._asdict()} for one in found]
        rows += [{"kind": "kept", **one._asdict()} for one in kept]
        click.echo(json.dumps(rows, indent=2, default=str))
        return
    width = max(map(len, [*(one.name for one in found), *(cache.name for cache in kept)]), default=0)
    for one in found:
        click.echo(f"{one.name:{width}}  {in_words(one.size):>7}")
    if not found:
        click.echo("There is no model on this machine.")
    if kept:
        click.echo("\nAlso kept:")
    for cache in kept:
        click.echo(f"{cache.name:{width}}  {in_words(cache.size):>7}  {cache.what}")
    note(
        "To get more: pyfly-cpp models fetch hf:OWNER/REPO:TYPE\n"
        "To find a draft for a model: pyfly-cpp models pair MODEL\n"
        "To delete one: pyfly-cpp models remove NAME"
    )


@command.command(epilog="Example: pyfly-cpp models fetch hf:Qwen/Qwen3-0.6B-GGUF:Q8_0")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def fetch(names: tuple[str, ...]) -> None:
    """Fetch models of the hub, check them, and print their paths.

    An interrupted fetch resumes if it was the connection that broke. A model that is here already is
    checked.
    """
    for name in names:
        if not hub.is_hub_name(name):
            here = models.resolve_model(name)  # says what is wrong with another name
            raise ValueError(f"{name!r} is here already ({here}); fetch takes names of the hub, hf:OWNER/REPO:TYPE.")
    for name in names:
        click.echo(fetch_with_bar(name))


@command.command(epilog='Example: llama-cli -m "$(pyfly-cpp models path smollm2-135m)"')
@click.argument("name", type=MODEL)
def path(name: str) -> None:
    """Print the path of the model NAME."""
    click.echo(models.resolve_model(name))


@command.command("remove", epilog="Example: pyfly-cpp models remove hf:Qwen/Qwen3-0.6B-GGUF:Q8_0 --yes")
@click.argument(
    "names", metavar="NAME...", type=Written("name", words=lambda _: removable_names()), nargs=-1, required=True
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def remove_models(names: tuple[str, ...], yes: bool) -> None:
    """Delete models of this program's folder or of the hub, and what else this program keeps.

    NAME is from `models list`. `costs` and `kernels` are measured again when they are needed.
    """
    for what in {one.paths: one for one in map(removable, names)}.values():
        ask_for(f"this deletes {', '.join(map(str, what.paths))} ({in_words(what.size)})", yes)
        remove(what)


@command.command(epilog="Example: pyfly-cpp models pair ./Qwen2.5-7B-Instruct-Q4_K_M.gguf")
@click.argument("target", type=MODEL, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def pair(target: str | None, as_json: bool) -> None:
    """List drafts for the model TARGET.

    For a file: the files on this machine that fit it, and the published draft for its family. The search covers the
    model's own folder and those of this program, the hub, llama.cpp, LM Studio and Ollama. For the name of a family's
    model, such as qwen2.5-7b: its published draft. For a name of the hub that is not on this machine: the files that
    the hub offers, with sizes and licences. Without TARGET: the known families.

    A draft that fits need not be faster: `bench` measures the speed, and the governor leaves out a drafter that is not
    faster.
    """
    if target is None:
        _show_families(as_json)
    elif hub.is_hub_name(target) and models.locate(target) is None:
        _show_offers(*offers(hub.read_name(target)), as_json)
    elif models.locate(target) is None and not os.path.exists(target) and (known := published_pair(target)):
        _show_published(known, as_json)
        if not as_json:
            _suggest_own_draft("FILE", "A model of type F16")
    else:
        try:
            file = models.resolve_model(target)
        except ValueError as error:
            raise ValueError(f"{error} `pyfly-cpp models pair` lists the families with a known draft.") from None
        _show_companions(file, as_json)


def _show_families(as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([asdict(one) for one in PAIRS], indent=2))
        return
    for one in PAIRS:
        what = one.note if one.draft is None else f"{one.draft}, {in_words(one.size)}, {one.licence}"
        click.echo(f"{one.family}: {what}")
        for repo in one.targets:
            click.echo(f"  for hf:{repo}")


def _show_offers(target: Offer, published: Offer | None, as_json: bool) -> None:
    is_too_large = published is not None and _is_too_large(published.model.size, target.model.size)
    draft = None if is_too_large else published
    if as_json:
        click.echo(json.dumps({"target": _offer(target), "draft": draft and _offer(draft)}, indent=2))
        return
    for what, offer in (("target", target), ("draft", draft)):
        if offer is not None:
            facts = [in_words(offer.model.size), offer.licence or "licence not stated"]
            if len(offer.model.files) > 1:
                facts.append(f"{len(offer.model.files)} files")
            if offer.is_gated:
                facts.append("its terms must be accepted on its page")
            write(f"{what:6}  {offer.name}  {', '.join(facts)}\n")
    if draft is None:
        note(_why_no_draft(str(published.name) if published else None, published.model.size if published else 0))
    names = [str(offer.name) for offer in (target, draft) if offer is not None]
    click.echo(f"  pyfly-cpp models fetch {' '.join(names)}", err=True)
    click.echo(f"  pyfly-cpp chat -m {' -d '.join(names)}", err=True)


def _offer(offer: Offer) -> dict[str, Any]:
    files = [file._asdict() for file in offer.model.files]
    return {
        "name": str(offer.name), "type": offer.model.type, "size": offer.model.size, "licence": offer.licence,
        "gated": offer.is_gated, "files": files,
    }  # fmt: skip


def _show_companions(path: Path, as_json: bool) -> None:
    has_head = has_mtp_head(path)
    here = list(companions(path))
    known = published_pair(path)
    published = None if known is not None and _is_too_large(known.size, bytes_of_model(path)) else known
    if as_json:
        files = [
            {"path": str(one.path), "drafter": one.drafter.word, "size": one.size, "share": one.share} for one in here
        ]
        shown = None if published is None else asdict(published)
        click.echo(json.dumps({"mtp_head": has_head, "here": files, "published": shown}, indent=2))
        return
    if has_head:
        click.echo("* the model's own MTP head")
    width = max((len(one.path.name) for one in here), default=0)
    for i, one in enumerate(here):
        mark = "*" if i == 0 and not has_head else " "
        click.echo(f"{mark} {one.path.name:{width}}  {in_words(one.size):>7}  {one.share:4.0%}  {one.drafter.noun}")
    if not has_head and not here:
        click.echo("No file on this machine fits it as a draft.")
    if has_head or here:
        note("* used by --drafter auto; percentages: size relative to the model")
    if published is None:
        note(_why_no_draft(known.draft if known else None, known.size if known else 0))
    else:
        _show_published(published, as_json)
    if not has_head and can_draft_for_itself(path):
        _suggest_own_draft(shlex.quote(str(path)), "It")


def _suggest_own_draft(file: str, subject: str) -> None:
    note(f"{subject} can also draft for itself, quantised further:")
    click.echo(f"  pyfly-cpp models draft {file} --type {DEFAULT_TYPE}", err=True)


def _is_too_large(n_draft: int, n_target: int) -> bool:
    """Whether a draft of so many bytes is left out for a target of so many, as `companions` does."""
    return n_draft > MOST_SHARE * n_target


def _why_no_draft(name: str | None, size: int) -> str:
    """Why no published draft is shown: this one is too large; None: there is none."""
    if name is None:
        return "No published draft for it is known."
    return f"{name} ({in_words(size)}) is too large to draft for it: more than {MOST_SHARE:.0%} of its size."


def _show_published(published: Pair, as_json: bool) -> None:
    """The published draft of a family."""
    if as_json:
        click.echo(json.dumps({"published": asdict(published)}, indent=2))
    elif published.draft is None:
        note(f"{published.family}: {published.note}")
    else:
        size = in_words(published.size)
        note(f"Published draft for {published.family} ({size}, {published.licence}):")
        click.echo(f"  pyfly-cpp models fetch {published.draft}", err=True)


command.add_command(draft)
