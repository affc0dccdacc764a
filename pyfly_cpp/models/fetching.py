"""Fetching models of the hub."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.files import sha256
from pyfly_cpp.models import hub

_ATTEMPTS = 5

Progress = Callable[[str, int, int], None]
"""Called with a name for the work, the bytes done, and all bytes."""


def fetch(name: str, on_progress: Progress | None = None) -> Path:
    """Brings a model of the hub onto this machine, or checks the one that is there; returns the path of the file to
    load. The files lie in the hub's own cache; huggingface_hub resumes downloads, and shows its own progress.

    Args:
        name: `hf:OWNER/REPO:TYPE`, `hf:OWNER/REPO` or `hf:OWNER/REPO/FILE`. Of a split model all parts are fetched.
        on_progress: Called while a file is checked.

    Raises:
        ValueError: the name means no model, or several; or huggingface_hub is not installed.
        PyflyError: a download failed, or a checksum is wrong.
    """
    progress = on_progress or (lambda what, done, total: None)
    wanted = hub.read_name(name)
    if wanted.file is not None:
        if hub.locate(wanted) is None:
            hub.ask(wanted.repo)  # fails immediately without a network, while a download tries for half a minute
        files = [hub.HubFile(part, 0) for part in hub.parts_of(wanted.file)]
    else:
        try:
            files = list(hub.ask(wanted.repo).model(wanted).files)
        except PyflyError:
            here = hub.locate(wanted)
            if here is None:
                raise
            for part in hub.parts_of(str(here)):  # what is here can be checked without the hub
                _check(name, Path(part), None, progress)
            return here
    paths = [_fetch_file(wanted, file, progress) for file in files]
    return paths[0]


def _fetch_file(name: hub.HubName, file: hub.HubFile, progress: Progress) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise hub.no_hub(str(name)) from None
    what = str(hub.HubName(name.repo, file.name))
    for left in reversed(range(_ATTEMPTS)):
        try:
            path = Path(hf_hub_download(name.repo, file.name))
            break
        except Exception as error:  # of the HTTP library that huggingface_hub uses
            if not left or not hub.is_of_connection(error):
                raise hub.refusal(what, error) from error
        time.sleep(1)  # releases before 2 leave going on after a broken connection to the next call
    _check(what, path, file.sha256, progress)
    return path


def _check(name: str, path: Path, expected: str | None, progress: Progress) -> None:
    """Removes a file that is not what the hub announced, and raises PyflyError. The hub's cache names a large file by
    the SHA-256 that the hub announced, and looks at its size alone."""
    blob = Path(os.path.realpath(path))
    if expected is None and re.fullmatch("[0-9a-f]{64}", blob.name):
        expected = blob.name
    size = blob.stat().st_size
    if expected is None or sha256(blob, report=lambda done: progress("checking", done, size)) == expected:
        return
    for damaged in (path, blob):
        damaged.unlink(missing_ok=True)
    raise PyflyError(f"{name!r} arrived damaged (wrong SHA-256) and was removed; fetch it again.")
