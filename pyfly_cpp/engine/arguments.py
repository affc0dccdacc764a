"""Checks of a FlyLlama's arguments: what the base class or llama.cpp would answer less clearly, or not survive."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import llama_cpp

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.drafters import Drafter
from pyfly_cpp.decoding.drafters.drafter import field_names
from pyfly_cpp.machine.cache_types import require_cache_types
from pyfly_cpp.ranges import require_integer

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
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{who} has no argument {unknown[0]!r}.{hint}")
    for name, least in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 0)):
        require_integer(name, arguments.get(name, least), least)
    require_cache_types(arguments.get("type_k"), arguments.get("type_v"), arguments.get("flash_attn"))


_SETTINGS = ("decoding", *field_names(Decoding), "on_prefill", "protected", "trace")
"""Attributes that may be set on a FlyLlama, besides the attributes of the base class."""


def require_attribute(kind: type, name: str) -> None:
    """Raises ValueError if a new attribute of an object of this class is nearly, but not quite, a setting's name.
    Others are the caller's own business, or the base class's."""
    if name.startswith("_") or name in _SETTINGS or hasattr(kind, name):
        return
    near = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.8)
    if near:
        raise ValueError(f"a {kind.__name__} has no setting {name!r}. Did you mean {near[0]!r}?")


def require_fitting(draft_max: int | None, n_batch: int) -> None:
    """Raises ValueError unless a batch of n_batch tokens holds a step of draft_max."""
    if draft_max is not None and draft_max > n_batch - 1:
        raise ValueError(
            f"draft_max is {draft_max}, but a batch of n_batch = {n_batch} tokens holds the last token and at "
            f"most {n_batch - 1} drafts; lower draft_max or raise n_batch."
        )


def draft_max_of(drafter: Drafter, asked: int | None, n_batch: int = 2**31) -> int:
    """Most tokens in a step with this drafter: the number set for all or for this one, or else its own, as far as a
    batch of n_batch holds them."""
    asked = getattr(drafter, "draft_max", None) if asked is None else asked
    k: int = getattr(drafter, "draft_most", 10) if asked is None else asked
    return min(k, n_batch - 1)
