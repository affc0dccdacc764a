"""Models of the hub for the commands: fetching with a bar, and the offer to fetch one that a command needs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click
from rich.progress import DownloadColumn, TimeRemainingColumn

from pyfly_cpp.cli.terminal import Bar, has_user
from pyfly_cpp.machine.memory import in_words
from pyfly_cpp.models import hub
from pyfly_cpp.models.fetching import fetch
from pyfly_cpp.models.named import locate, resolve_model


def fetch_with_bar(name: str) -> Path:
    """Fetches a model of the hub, and shows how far its check is; as `models.fetching.fetch`, which raises the same."""
    with Bar(DownloadColumn(), TimeRemainingColumn()) as bar:
        return fetch(name, bar.update)


def find_model(text: str) -> Path:
    """The file that a path or a name means. If it names a model of the hub that is not here, and somebody sits at a
    terminal, it is offered with its size, and fetched on a yes.

    Raises:
        ValueError: as `resolve_model`, also after a no.
        PyflyError: the hub cannot be reached or does not know the model, or the download failed.
    """
    if has_user() and hub.is_hub_name(text) and locate(text) is None and _is_wanted(hub.read_name(text)):
        return fetch_with_bar(text)
    return resolve_model(text)


def _is_wanted(name: hub.HubName) -> bool:
    listing = hub.ask(name.repo)
    model = listing.model(name if name.file is None else name._replace(file=hub.parts_of(name.file)[0]))
    licence = f", {listing.licence}" if listing.licence else ""
    what = f"{listing.name(model)} is not on this machine. Fetch it from the hub ({in_words(model.size)}{licence})?"
    with contextlib.redirect_stdout(sys.stderr):  # click before 8.3.1 writes a space to stdout
        return click.confirm(what, default=True, err=True, prompt_suffix=" ")
