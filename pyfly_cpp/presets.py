"""Presets: how to decode, kept in a file, with the measurement it rests on.

JSON, written by `pyfly-cpp tune` or by hand; SHIPPED come with the package (folder shipped_presets) and have names:

    {"format": 1,
     "model": "target.gguf",                      optional; relative paths are relative to the preset's folder
     "drafter": {"kind": "draft", "model_path": "draft.gguf", "draft_max": 8},      or null, or a list of several,
                                                  or "auto", the model's own, under the governor;
                                                  the kinds are the words of drafters.DRAFTERS (draft, lookup, ...),
                                                  their fields those of its classes (DraftModel, PromptLookup, ...)
     "gate": "margin:0.3",
     "window": {"size": 6, "rule": "reconverge"},  or null, as without it: the gate's own
     "draft_max": 8,
     "claim": {...}}                              what was measured, for people; nothing reads it
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pyfly_cpp.drafters import DRAFTERS, AnyDrafter, Drafter, OwnDrafter, require_drafters
from pyfly_cpp.drafters.drafter import field_names
from pyfly_cpp.files import is_stream, require_free, write_atomically
from pyfly_cpp.rules import Exact, Gate, parse_gate
from pyfly_cpp.windows import Window

FORMAT = 1
SHIPPED = ("safe", "balanced", "fast")
"""Names of presets that say what is accepted loosely and leave the rest alone; their claims say what that costs."""

_FOLDER = Path(__file__).with_name("shipped_presets")


class PresetError(ValueError):
    """A preset file is missing, malformed or of a newer format; the message names file and field."""


@dataclass(frozen=True)
class Preset:
    """How to decode."""

    gate: Gate = Exact()  # noqa: RUF009 - frozen
    window: Window | None = None
    """None: the gate's own."""
    draft_max: int | None = None
    drafter: AnyDrafter | Literal["auto"] | None = None
    """`"auto"`: what is chosen for the model, and the governor says how much of it."""
    model: str | None = None
    """Path of the target."""
    claim: dict[str, Any] = field(default_factory=dict)
    """What was measured, on how many prompts, on which machine."""

    @property
    def leaves_drafter(self) -> bool:
        """Whether it says nothing about drafting."""
        return self.drafter == "auto"

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Those that it names."""
        return () if self.leaves_drafter else require_drafters(self.drafter)

    def arguments(self) -> dict[str, Any]:
        """Arguments of `FlyLlama`, with a drafter without the governor, as it was measured; `model_path` is among them
        if the preset names a model, `n_gpu_layers` if the claim says how many it was measured with."""
        out = {"gate": self.gate, "window": self.window, "draft_max": self.draft_max, "drafter": self.drafter}
        out["adaptive"] = self.leaves_drafter
        if self.model is not None:
            out["model_path"] = self.model
        models = self.claim.get("models")
        n_gpu_layers = models.get("gpu_layers") if isinstance(models, dict) else None
        return {**out, "n_gpu_layers": n_gpu_layers} if isinstance(n_gpu_layers, int) else out

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        drafters: Any = [drafter_as_dict(drafter) for drafter in self.drafters]
        if not isinstance(self.drafter, tuple):
            drafters = drafters[0] if drafters else None
        return {
            "format": FORMAT,
            "model": self.model,
            "drafter": self.drafter if self.leaves_drafter else drafters,
            "gate": str(self.gate),
            "window": self.window and {k: v for k, v in asdict(self.window).items() if v is not None},
            "draft_max": self.draft_max,
            "claim": self.claim,
        }


def load_preset(path: str | os.PathLike[str]) -> Preset:
    """Reads and checks a preset; raises PresetError. A name of SHIPPED is that preset; a file of such a name is
    ./NAME."""
    name = os.fspath(path)
    if name in SHIPPED:
        path = _FOLDER / f"{name}.json"
    try:
        return _load(path, name)
    except RecursionError:  # in reading it, or in naming what is wrong in it
        raise PresetError(f"the preset {name} is nested too deep; write it anew.") from None


def _load(path: str | os.PathLike[str], name: str) -> Preset:
    if is_stream(path):
        raise PresetError(f"the preset {name} is a device or a pipe; give the path of a JSON file.")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(data, ensure_ascii=False).encode("utf-8")  # an escape may be half a character
    except OSError as error:
        names = ", ".join(SHIPPED)
        raise PresetError(
            f"the preset {name} cannot be read ({error.strerror}); check the path, or take one of {names}."
        ) from None
    except ValueError as error:
        raise PresetError(f"the preset {name} is not JSON ({error}).") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PresetError(f"the preset {name} has the format {found!r}, and this pyfly-cpp reads {FORMAT}.")
    _known(name, "the preset", data, ("format", "model", "drafter", "gate", "window", "draft_max", "claim"))
    folder = Path(path).resolve().parent
    model, draft_max, claim = data.get("model"), data.get("draft_max"), data.get("claim", {})
    if model is not None and not _is_path(model):
        raise PresetError(f"{name}: 'model' must be a path or null, not {model!r}.")
    if draft_max is not None and (isinstance(draft_max, bool) or not isinstance(draft_max, int) or draft_max < 0):
        raise PresetError(f"{name}: 'draft_max' must be an integer >= 0 or null, not {draft_max!r}.")
    if not isinstance(claim, dict):
        raise PresetError(f"{name}: 'claim' must be an object, not {claim!r}.")
    gate, window = data.get("gate", "exact"), data.get("window")
    if not isinstance(gate, str):
        raise PresetError(f"{name}: 'gate' must be a text such as margin:0.3, not {gate!r}.")
    try:
        return Preset(
            parse_gate(gate),
            None if window is None else Window(**_object(name, "window", window, field_names(Window))),
            draft_max,
            _drafters(name, folder, data.get("drafter")),
            str(folder / model) if model is not None else None,
            claim,
        )
    except PresetError:
        raise
    except ValueError as error:
        raise PresetError(f"{name}: {error}") from None


def save_preset(preset: Preset, path: str | os.PathLike[str], force: bool = False) -> None:
    """Writes a preset; raises OutputError if the file exists and `force` is off, or cannot be written."""
    require_free(path, force)
    write_atomically(path, json.dumps(preset.as_dict(), indent=1, ensure_ascii=False) + "\n")


def drafter_as_dict(drafter: Drafter) -> dict[str, Any]:
    """Kind and fields of a drafter, fit for JSON; raises ValueError for a callable."""
    if not isinstance(drafter, OwnDrafter):
        raise ValueError(f"a preset cannot hold the drafter {drafter!r}; the kinds are {', '.join(DRAFTERS)}.")
    values = {name: getattr(drafter, name) for name in field_names(type(drafter))}
    values = {name: drafter_as_dict(value) if name in drafter.inner else value for name, value in values.items()}
    return {"kind": drafter.word, **{name: value for name, value in values.items() if value is not None}}


def _drafters(name: str, folder: Path, data: Any) -> AnyDrafter | Literal["auto"] | None:
    if data == "auto":
        return "auto"
    if isinstance(data, list) and data:
        return tuple(_drafter(name, folder, one) for one in data)
    return None if data is None else _drafter(name, folder, data)


def _drafter(name: str, folder: Path, data: Any) -> Drafter:
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in DRAFTERS:
        raise PresetError(f"{name}: the drafter's 'kind' must be one of {', '.join(DRAFTERS)}, not {kind!r}.")
    made = DRAFTERS[kind]
    arguments = {k: v for k, v in data.items() if k != "kind"}
    arguments = _object(name, "drafter", arguments, field_names(made))
    if made.inner and made.inner[0] not in arguments:
        raise PresetError(
            f"{name}: a drafter of kind {kind!r} needs {made.inner[0]!r}, itself a drafter with its 'kind'."
        )
    arguments.update({field: _drafter(name, folder, arguments[field]) for field in made.inner if field in arguments})
    for path_field in made.path_fields:
        given = arguments.get(path_field)
        if given is not None:
            paths = given if isinstance(given, list) else [given]
            if not all(map(_is_path, paths)):
                raise PresetError(
                    f"{name}: {path_field!r} of a drafter of kind {kind!r} must be a path, or a list of paths."
                )
            paths = [str(folder / path) for path in paths]
            arguments[path_field] = paths if isinstance(given, list) else paths[0]
    path = arguments.get(made.file_field)
    if made.takes_file and (path is not None or (made.needs_file and not made.inner)):
        if not _is_path(path):
            raise PresetError(f"{name}: a drafter of kind {kind!r} needs {made.file_field!r}, the path of its file.")
        arguments = {**arguments, made.file_field: str(folder / str(path))}
    return made(**arguments)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _object(name: str, what: str, data: Any, known: Iterable[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise PresetError(f"{name}: {what!r} must be an object, not {data!r}.")
    _known(name, what, data, known)
    return data


def _known(name: str, what: str, data: dict[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PresetError(f"{name}: {what} has no field {key!r}.{hint} The fields are {', '.join(known)}.")
