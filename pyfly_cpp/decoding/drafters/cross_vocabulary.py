"""A draft model with another tokenizer than the target's."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters.draft_model import DraftModel
from pyfly_cpp.decoding.drafters.drafter import AnyOption, Host, OwnDrafter


@dataclass(frozen=True)
class CrossVocabulary(OwnDrafter):
    """A draft model of another family: it sees the text in its own tokens, and the text that it drafts is tokenised for
    the target. Control tokens that are written alike, or end a turn, stand for each other. Its drafts have no
    distribution that could be compared with the target's. FLy (arXiv 2511.22972) pairs models like this.
    """

    word = "cross"
    noun = "a draft model"
    needs_file = takes_file = takes_draft = True
    options: ClassVar[tuple[AnyOption, ...]] = DraftModel.options

    draft: DraftModel
    """draft_max counts the target's tokens; p_min applies to the draft's own."""

    def __post_init__(self) -> None:
        if not isinstance(self.draft, DraftModel):
            raise ValueError(f"CrossVocabulary takes a DraftModel, not {self.draft!r}.")

    @property
    def model_path(self) -> str | os.PathLike[str]:
        """The draft model's file."""
        return self.draft.model_path

    @property
    def draft_max(self) -> int | None:  # type: ignore[override]
        """The draft model's `draft_max`."""
        return self.draft.draft_max

    @property
    def draft_most(self) -> int:  # type: ignore[override]
        return self.draft.draft_most

    @classmethod
    def make(cls, file: str | os.PathLike[str] | None = None, **fields: Any) -> CrossVocabulary:
        return cls(DraftModel.make(file, **fields))

    def but(self, **changes: Any) -> CrossVocabulary:
        return replace(self, draft=self.draft.but(**changes))

    def open(self, host: Host) -> _native.Drafter:
        return self.draft.open_as("cross-vocabulary", "cross", host)

    def __str__(self) -> str:
        return f"{self.draft} of another vocabulary"
