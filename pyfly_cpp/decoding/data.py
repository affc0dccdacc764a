"""Drafters as JSON has them: an object of kind and fields, several in a list, null for none, or a word."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyfly_cpp.decoding.drafters import DRAFTERS, AnyDrafter, Drafter, OwnDrafter
from pyfly_cpp.decoding.drafters.drafter import field_names
from pyfly_cpp.errors import did_you_mean
from pyfly_cpp.models.named import is_name


def drafter_as_data(drafter: Any) -> Any:
    """The JSON of a drafter, of several, or of a word; raises ValueError for a callable."""
    if isinstance(drafter, str):
        return None if drafter == "none" else drafter
    if isinstance(drafter, (tuple, list)):
        return [drafter_as_data(one) for one in drafter]
    if not isinstance(drafter, OwnDrafter):
        raise ValueError(f"a preset cannot hold the drafter {drafter!r}; the kinds are {', '.join(DRAFTERS)}.")
    values = {name: getattr(drafter, name) for name in field_names(type(drafter))}
    values = {name: drafter_as_data(value) if name == "draft" else value for name, value in values.items()}
    return {"kind": drafter.word, **{name: value for name, value in values.items() if value is not None}}


def drafter_of_data(data: Any, folder: Path | None = None) -> AnyDrafter | str:
    """The drafter, the drafters or the word that JSON has; raises ValueError.

    Args:
        folder: What relative paths are relative to; None: they stay as they are.
    """
    if data is None or isinstance(data, str):
        return "none" if data is None else data
    if isinstance(data, list) and data:
        return tuple(_drafter(one, folder) for one in data)
    return _drafter(data, folder)


def _drafter(data: Any, folder: Path | None) -> Drafter:
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in DRAFTERS:
        raise ValueError(f"the drafter's 'kind' must be one of {', '.join(DRAFTERS)}, not {kind!r}.")
    made = DRAFTERS[kind]
    names = field_names(made)
    arguments = require_fields("'drafter'", {k: v for k, v in data.items() if k != "kind"}, names)
    if "draft" in names:  # itself a drafter
        if "draft" not in arguments:
            raise ValueError(f"a drafter of kind {kind!r} needs 'draft', itself a drafter with its 'kind'.")
        return made(**{"draft": _drafter(arguments["draft"], folder)})
    for path_field in made.path_fields:
        given = arguments.get(path_field)
        if given is not None:
            paths = list(given) if isinstance(given, (list, tuple)) else [given]
            if not all(map(is_path, paths)):
                raise ValueError(f"{path_field!r} of a drafter of kind {kind!r} must be a path, or a list of paths.")
            paths = [_placed(path, folder) for path in paths]
            arguments[path_field] = paths[0] if isinstance(given, str) else paths
    path = arguments.get(made.file_field)
    if made.takes_file and (path is not None or made.needs_file):
        if not is_path(path):
            raise ValueError(f"a drafter of kind {kind!r} needs {made.file_field!r}, the path of its file.")
        arguments = {**arguments, made.file_field: placed_model(path, folder)}
    return made(**arguments)


def placed_model(path: Any, folder: Path | None) -> str:
    """A model's path, from a folder; a name stays, unless a file there has it."""
    return str(path) if is_name(path) and not (folder and os.path.exists(folder / path)) else _placed(path, folder)


def _placed(path: Any, folder: Path | None) -> str:
    return str(path) if folder is None else str(folder / path)


def is_path(value: Any) -> bool:
    """Whether it can be the name of a file."""
    return isinstance(value, str) and "\0" not in value


def require_fields(what: str, data: Any, known: Iterable[str]) -> dict[str, Any]:
    """The object, if it has known fields only; raises ValueError, with the nearest field."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be an object, not {data!r}.")
    known = list(known)
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ValueError(f"{what} has no field {key!r}.{hint} The fields are {', '.join(known)}.")
    return data
