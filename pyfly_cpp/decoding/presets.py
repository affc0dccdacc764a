"""Presets: how to decode, kept in a file, with the measurement it rests on.

JSON, written by `pyfly-cpp bench --write-preset` or by hand; SHIPPED come with the package (folder shipped_presets) and
have names:

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

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyfly_cpp.decoding.data import is_path, placed_model, require_fields
from pyfly_cpp.decoding.drafters import Drafter, as_given, require_drafters
from pyfly_cpp.decoding.drafters.drafter import field_names
from pyfly_cpp.decoding.setting import PLAIN, Decoding
from pyfly_cpp.machine.files import is_stream, require_free, write_atomically

FORMAT = 1
SHIPPED = ("fast", "paper")
"""Names of presets that set what is accepted loosely and leave model and drafter alone (`paper` also sets the draft
length, without the governor); their claims state the cost."""

_FOLDER = Path(__file__).with_name("shipped_presets")


class PresetError(ValueError):
    """A preset file is missing, malformed or of a newer format; the message names file and field."""


@dataclass(frozen=True)
class Preset:
    """How to decode, and the measurements behind that."""

    decoding: Decoding = PLAIN
    """With the drafter `"auto"`: what is chosen for the model, and the governor decides how much of it."""
    model: str | None = None
    """Path of the target."""
    claim: dict[str, Any] = field(default_factory=dict)
    """The measurement: its result, its prompts, its machine."""

    @property
    def leaves_drafter(self) -> bool:
        """Whether it sets nothing about drafting."""
        return bool(self.decoding.drafter == "auto")

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Those that it names."""
        return () if self.leaves_drafter else require_drafters(self.decoding.drafter)

    def arguments(self) -> dict[str, Any]:
        """Arguments of `FlyLlama` that load what it names: `drafter`; `model_path` if it names a model; `n_gpu_layers`
        if the claim names the number it was measured with. (How to decode is `resolve_setting`.)"""
        out: dict[str, Any] = {"drafter": "auto" if self.leaves_drafter else as_given(self.drafters)}
        if self.model is not None:
            out["model_path"] = self.model
        models = self.claim.get("models")
        n_gpu_layers = models.get("gpu_layers") if isinstance(models, dict) else None
        return {**out, "n_gpu_layers": n_gpu_layers} if isinstance(n_gpu_layers, int) else out

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {"format": FORMAT, "model": self.model, **self.decoding.to_dict(), "claim": self.claim}


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
        raise PresetError(
            f"the preset {name} is not JSON ({error}); correct it, or take one of {', '.join(SHIPPED)}."
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise PresetError(f"the preset {name} has the format {found!r}, and this pyfly-cpp reads {FORMAT}.")
    try:
        return _read(data, Path(path).resolve().parent)
    except ValueError as error:
        raise PresetError(f"{name}: {error}") from None


def _read(data: dict[str, Any], folder: Path) -> Preset:
    own, fields = ("format", "model", "claim"), field_names(Decoding)
    require_fields("the preset", data, (*own, *fields))
    model, claim = data.get("model"), data.get("claim", {})
    if model is not None and not is_path(model):
        raise ValueError(f"'model' must be a path or null, not {model!r}.")
    if not isinstance(claim, dict):
        raise ValueError(f"'claim' must be an object, not {claim!r}.")
    if isinstance(data.get("drafter"), str) and data["drafter"] != "auto":
        raise ValueError(
            f"'drafter' must be an object with its 'kind', a list of them, \"auto\" or null, not {data['drafter']!r}."
        )
    said = {"drafter": None, **{name: value for name, value in data.items() if name in fields}}
    decoding = Decoding.from_dict(said, folder)
    return Preset(decoding, None if model is None else placed_model(model, folder), claim)


def save_preset(preset: Preset, path: str | os.PathLike[str], force: bool = False) -> None:
    """Writes a preset; raises OutputError if the file exists and `force` is off, or cannot be written."""
    require_free(path, force)
    write_atomically(path, json.dumps(preset.as_dict(), indent=1, ensure_ascii=False) + "\n")
