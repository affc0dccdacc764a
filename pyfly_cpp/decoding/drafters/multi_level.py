"""Multi-level drafting: a draft model that is drafted for itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters.drafter import Host, Option, field_names
from pyfly_cpp.decoding.drafters.model import AroundModel, DraftModel
from pyfly_cpp.decoding.drafters.prompt_lookup import PromptLookup


@dataclass(frozen=True)
class MultiLevel(AroundModel):
    """A draft model that verifies what prompt lookup proposes while it drafts, in one evaluation of several rows. Its
    drafts are its own greedy ones, apart from how such batches round. Only what pays is tried: by what batches of the
    draft model cost, and by how often the proposals were right of late. Source: the multi-level acceleration of FLy
    (arXiv 2511.22972).
    """

    word = "multi"
    noun = "a draft model"
    inner = ("draft", "lookup")
    options: ClassVar[tuple[Option, ...]] = (*DraftModel.options, *PromptLookup.own_options)

    draft: DraftModel
    """One whose memory can be rolled back: not a recurrent one."""

    lookup: PromptLookup = PromptLookup(memory=0)  # noqa: RUF009 - frozen
    """It looks in the request's own text alone."""

    def __post_init__(self) -> None:
        if not isinstance(self.draft, DraftModel) or not isinstance(self.lookup, PromptLookup):
            raise ValueError(
                "MultiLevel takes a DraftModel and a PromptLookup that proposes to it, not "
                f"{self.draft!r} and {self.lookup!r}."
            )
        if self.lookup.texts or self.lookup.memory_file is not None:
            raise ValueError("MultiLevel looks in the request's own text alone; leave out texts and memory_file.")
        object.__setattr__(self, "lookup", self.lookup.alone)

    @classmethod
    def make(cls, file: str | os.PathLike[str] | None = None, **fields: Any) -> MultiLevel:
        of_lookup = {name: fields.pop(name) for name in field_names(PromptLookup) if name in fields}
        return cls(DraftModel.make(file, **fields), PromptLookup.make(**of_lookup))

    def but(self, **changes: Any) -> MultiLevel:
        of_lookup = {name: changes.pop(name) for name in field_names(PromptLookup) if name in changes}
        return replace(self, draft=self.draft.but(**changes), lookup=self.lookup.but(**of_lookup))

    def open(self, host: Host) -> _native.Drafter:
        return self.draft.open_as("multi-level", "multi", host, [self.lookup.native])

    def __str__(self) -> str:
        return f"{self.draft} with {self.lookup}"
