"""Checks of a FlyLlama's arguments: what the base class or llama.cpp would answer less clearly, or not survive."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import llama_cpp

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters.drafter import field_names
from pyfly_cpp.errors import ArgumentError
from pyfly_cpp.machine.cache_types import require_cache_types
from pyfly_cpp.ranges import is_integer, require_integer

BASE_DEFAULTS = {
    name: parameter.default
    for base in reversed(llama_cpp.Llama.__mro__[:-1])  # somebody's own subclass may take (*args, **kwargs)
    for name, parameter in inspect.signature(base.__init__).parameters.items()
    if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    and name not in ("self", "model_path")
}
"""The arguments of llama_cpp.Llama, with their defaults."""


def require_base_arguments(arguments: dict[str, Any], own: Iterable[str], who: str) -> None:
    """Raises ValueError unless these are arguments of llama_cpp.Llama, and sizes and cache types are possible. `own`:
    names of the arguments that `who` has besides, for the hint."""
    unknown = [name for name in arguments if name not in BASE_DEFAULTS]
    if unknown:
        names = [*BASE_DEFAULTS, *(name for name in own if name not in ("self", "kwargs"))]
        raise ValueError(f"{who} has no argument {unknown[0]!r}.{_hint(unknown[0], names)}")
    for name, least in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 0)):
        require_integer(name, arguments.get(name, least), least)
    require_cache_types(arguments.get("type_k"), arguments.get("type_v"), arguments.get("flash_attn"))


_SETTINGS = ("decoding", *field_names(Decoding), "on_prefill", "protected", "trace")
"""Attributes that may be set on a FlyLlama, besides the attributes of the base class."""


def require_attribute(kind: type, name: str, is_loaded: bool) -> None:
    """Raises ValueError for a new attribute of an object of this class that would set nothing.

    Attributes that the base class sets while it loads, and those of somebody's own subclass, are their business; but no
    name may be nearly, but not quite, a setting's.
    """
    if name.startswith("_") or name in _SETTINGS or hasattr(kind, name):
        return
    is_ours = is_loaded and kind.__module__.startswith("pyfly_cpp.")
    near = _hint(name, _SETTINGS, 0.6 if is_ours else 0.8)
    if near or is_ours:
        raise ValueError(
            f"a {kind.__name__} has no setting {name!r}.{near or ' Attributes of your own need a subclass.'}"
        )


def _hint(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A question after the one of these names that was probably meant; empty if none is near."""
    names = list(names)
    turned = [one for one in names if sorted(one) == sorted(name)]
    near = turned or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def require_names(function: str, signature: inspect.Signature, given: Iterable[str]) -> None:
    """Raises TypeError unless a function has arguments of all these names."""
    unknown = next((name for name in given if name not in signature.parameters), None)
    if unknown is not None:
        raise TypeError(f"{function} has no argument {unknown!r}.{_hint(unknown, signature.parameters)}")


_NUMBERS = ("top_p", "min_p", "typical_p", "tfs_z", "repeat_penalty", "frequency_penalty", "presence_penalty",
            "mirostat_tau", "mirostat_eta")  # fmt: skip
_INTEGERS = ("top_k", "mirostat_mode")


def require_sampling(sampling: Mapping[str, Any]) -> None:
    """Raises ValueError unless these arguments of `Llama.generate` are numbers, and the temperature is none below 0,
    which the base class takes for another way of sampling."""
    for name, value in sampling.items():
        if name == "temp" and (not _is_number(value) or not 0.0 <= value < math.inf):
            raise ValueError(f"temperature must be a finite number >= 0, not {value!r}; 0 is greedy.")
        if name in _INTEGERS and not is_integer(value):
            raise ValueError(f"{name} must be an integer, not {value!r}.")
        if name in _NUMBERS and not _is_number(value):
            raise ValueError(f"{name} must be a number, not {value!r}.")


def require_request(max_tokens: Any, seed: Any) -> None:
    """Raises ValueError unless these arguments of `create_completion` are numbers or None."""
    if max_tokens is not None and not isinstance(max_tokens, numbers.Real):
        raise ValueError(f"max_tokens must be a number of tokens, or None for no limit, not {max_tokens!r}.")
    if seed is not None and not is_integer(seed):
        raise ValueError(f"seed must be an integer or None, not {seed!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not math.isnan(value)


def require_fitting(draft_max: int | None, n_batch: int) -> None:
    """Raises ValueError unless a batch of n_batch tokens holds a step of draft_max."""
    if draft_max is not None and draft_max > n_batch - 1:
        raise ArgumentError(
            f"{{draft_max}} is {draft_max}, but a batch of {n_batch} tokens ({{n_batch}}) holds the last token and at "
            f"most {n_batch - 1} drafts; lower {{draft_max}} or raise {{n_batch}}."
        )
