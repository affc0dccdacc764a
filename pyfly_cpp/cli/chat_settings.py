"""The settings that a saved conversation carries: what /save keeps of them, and what /load takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pyfly_cpp.cli.options import WINDOW_OPTIONS, Options
from pyfly_cpp.llama.fly_llama import FlyLlama

_NUMBER, _COUNT, _NONE = (int, float), (int,), type(None)
_SAMPLING: dict[str, tuple[type, ...]] = {
    "temperature": _NUMBER,
    "top_k": _COUNT,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repeat_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "seed": (int, _NONE),
    "max_tokens": _COUNT,
}
_SAVED: dict[str, tuple[type, ...]] = {
    **_SAMPLING,
    "gate": (str,),
    "window": (int, _NONE),
    "window_rule": (str,),
    "window_tail": (int, _NONE),
    "across_rounds": (bool, _NONE),
}
"""What /save keeps of the options, and the types that /load takes; what range they have, the options themselves say."""


def settings_of(llm: FlyLlama, options: Options) -> dict[str, Any]:
    """What a saved conversation says of how it came about."""
    return {
        "model": Path(llm.model_path).name,
        "gate": str(llm.gate),
        **{name: getattr(options, name) for name in (*WINDOW_OPTIONS, "window_rule", *_SAMPLING)},
    }


def options_of(path: Path, settings: dict[str, Any], params: Sequence[click.Parameter]) -> dict[str, Any]:
    """The options among the settings of the conversation in `path`. `params`: those of the command.

    Raises:
        ValueError: a setting is not what the option of that name takes.
    """
    return {name: _checked(path, name, settings[name], params) for name in _SAVED if name in settings}


def changed(text: str, options: Options, params: Sequence[click.Parameter]) -> tuple[Options, str]:
    """The options after `/set NAME VALUE`, and the new setting for people; all of them where the text is empty.

    Raises:
        ValueError: there is no such setting, or it cannot have that value.
    """
    if not text:
        return options, ", ".join(f"{name} {getattr(options, name)}" for name in _SAMPLING)
    name, _, value = text.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if name not in _SAMPLING:
        raise ValueError(f"there is no setting {name!r} to change here. The settings are {', '.join(_SAMPLING)}.")
    if not value:
        return options, f"{name} {getattr(options, name)}"
    option = next(param for param in params if param.name == name)
    try:
        is_none = value == "none" and _NONE in _SAMPLING[name]
        given: dict[str, Any] = {name: None if is_none else option.type.convert(value, None, None)}
    except (click.BadParameter, OverflowError) as error:
        raise ValueError(f"{name} cannot be {value!r}: {error}") from None
    return replace(options, **given), f"{name} {given[name]}"


def _checked(path: Path, name: str, value: Any, params: Sequence[click.Parameter]) -> Any:
    types, option = _SAVED[name], next(param for param in params if param.name == name)
    try:
        if isinstance(value, types) and (not isinstance(value, bool) or bool in types):
            return None if value is None else option.type.convert(value, None, None)
        reason = "it is of another type"
    except (click.BadParameter, OverflowError) as error:
        reason = error.message if isinstance(error, click.BadParameter) else "it is too large"
    raise ValueError(
        f"{str(path)!r} has the setting {name} = {repr(value)[:60]}: {reason[:100].rstrip('.')}; nothing was loaded."
    )
