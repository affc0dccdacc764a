"""The base of all drafters, and their fields as options of the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Union

from pyfly_cpp import _native


def field_names(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(field.name for field in fields(kind))


class Option(NamedTuple):
    """A field of a drafter as an option of the command line."""

    name: str
    """As in Python; drafters whose options have one name share it."""
    field: str
    low: float
    """Least value."""
    help: str
    high: float | None = None
    """Largest value; None: 2**31 - 1."""
    default: float | None = None
    """None: the drafter's own; the help describes that. A float makes it an option that takes fractions."""


class PathOption(NamedTuple):
    """A field of a drafter that is a path, or several, as an option of the command line."""

    name: str
    field: str
    help: str
    is_many: bool = False

    @property
    def default(self) -> tuple[str, ...] | None:
        """No path."""
        return () if self.is_many else None


class NamesOption(NamedTuple):
    """A field of a drafter that is names of devices, as an option of the command line."""

    name: str
    field: str
    help: str
    default: None = None


AnyOption = Union[Option, PathOption, NamesOption]


@dataclass(frozen=True)
class Host:
    """The FlyLlama that a drafter is opened for."""

    target: Callable[[], _native.LlamaTarget]
    """Opens the target, if it is not yet."""
    draft_max: int
    """Most tokens that the drafter will be asked for in a step."""
    has_own_head: bool
    """Whether the target was loaded with the MTP head of its file."""
    settings: Mapping[str, int]
    """Fields of `pyfly_draft_model_config` of pyfly.h that a model of the drafter's own takes from the target."""
    vocabulary: Callable[[], Any]
    """The target's llama_vocab as llama_cpp holds it (a ctypes pointer)."""
    is_fixed: bool = False
    """Whether every draft is to have `draft_max` tokens: then one that cannot draft so many refuses."""


class OwnDrafter:
    """The base of all drafters but the callables."""

    word: ClassVar[str]
    """In settings, in presets and for --drafter."""
    noun: ClassVar[str]
    """For people, with its article."""
    needs_file: ClassVar[bool] = False
    """Whether it cannot be without a file of its own."""
    takes_file: ClassVar[bool] = False
    file_field: ClassVar[str] = "model_path"
    """The field that names the file, if it takes one."""
    takes_draft: ClassVar[bool] = False
    """Whether that file is a draft model."""
    has_distributions: ClassVar[bool] = False
    """Whether its drafts come with the distributions that they are drawn from."""
    is_head: ClassVar[bool] = False
    """Whether it reads the target's hidden states, so that it must see the target evaluate the prompt."""
    options: ClassVar[tuple[AnyOption, ...]] = ()
    path_fields: ClassVar[tuple[str, ...]] = ()
    """Further fields that name files: a path, or several."""
    draft_max: int | None = None
    """Tokens in a step (K), >= 1, if a number is asked for; None: as many as save time, `draft_most` at most, or
    without the governor just as many."""
    draft_most: int
    """Default longest draft: draft models 8, heads 3, heads that draft blocks 15, prompt lookup `num_pred_tokens`."""

    @property
    def in_target(self) -> bool:
        """Whether it is read from the target's own file, together with the target."""
        return False

    @property
    def file(self) -> str | os.PathLike[str] | None:
        """The drafter's file, if any."""
        return getattr(self, self.file_field) if self.takes_file else None

    @classmethod
    def make(cls, file: str | os.PathLike[str] | None = None, **fields: Any) -> Any:
        """The drafter with these fields; `file` and `draft_max` count if it has such fields."""
        if file is not None and cls.takes_file:
            fields[cls.file_field] = file
        return cls(**fields)

    @classmethod
    def fields_of(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of these values, by the names of its `options`; others are none of its business."""
        return {option.field: options[option.name] for option in cls.options if option.name in options}

    def but(self, **changes: Any) -> Any:
        """The same with other values of some fields, as `make` takes them."""
        return replace(self, **changes)  # type: ignore[type-var]

    def open(self, host: Host) -> _native.Drafter:
        """Loads it; raises ValueError or IncompatibleDraftError."""
        raise NotImplementedError
