"""Heads: drafters that read the target's hidden states."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters.draft_model import WithModel
from pyfly_cpp.decoding.drafters.drafter import Host
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.models.named import model_file


@dataclass(frozen=True)
class MTP(WithModel):
    """Multi-token prediction: the NextN blocks in the file of many models (or in a companion file). They
    read the target's hidden states, use the weights that are loaded, and cost one block for each drafted token.
    """

    word = "mtp"
    noun = "an MTP head"
    is_head = True
    draft_most = 3

    model_path: str | os.PathLike[str] | None = None
    """Path of the companion GGUF file, or a name as for others; None: the head is in the target's own file."""

    draft_max: int | None = None
    p_min: float = 0.0

    @property
    def in_target(self) -> bool:
        return self.model_path is None

    def open(self, host: Host) -> _native.Drafter:
        what = "MTP head"
        if (path := None if self.model_path is None else model_file(self.model_path, what)) is not None:
            require_gguf(path, what)
        # Chained heads draft one token each; where no number was asked for, as many as there are.
        k = 1 if self.draft_max is None and not host.is_fixed else host.draft_max
        own = host.has_own_head
        return _native.ModelDrafter("MTP", "mtp", host.target(), path, self.p_min, k, own, **host.settings)

    def __str__(self) -> str:
        return "MTP head" if self.model_path is None else f"MTP head {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class Eagle3(WithModel):
    """An EAGLE-3 head: a one-layer model that reads the target's hidden states at three depths. It belongs to one
    model; token embedding and output matrix may be the target's. Source: Li et al. 2025, "EAGLE-3".
    """

    word = "eagle3"
    noun = "an EAGLE-3 head"
    needs_file = is_head = True
    draft_most = 3

    model_path: str | os.PathLike[str]
    """Path of the head's GGUF file, or a name from `pyfly-cpp models list`."""

    draft_max: int | None = None
    p_min: float = 0.0

    def open(self, host: Host) -> _native.Drafter:
        require_gguf(path := model_file(self.model_path, "EAGLE-3 head"), "EAGLE-3 head")
        return _native.ModelDrafter("EAGLE-3", "eagle3", host.target(), path, self.p_min, **host.settings)

    def __str__(self) -> str:
        return f"EAGLE-3 head {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class DFlash(WithModel):
    """A DFlash head: a few layers that read the target's hidden states and draft a whole block of tokens in one pass,
    so that a long draft costs little more than a short one. It belongs to one model; token embedding and output matrix
    may be the target's. Source: arXiv 2602.06036, "DFlash".
    """

    word = "dflash"
    noun = "a DFlash head"
    needs_file = is_head = True
    draft_most = 15

    model_path: str | os.PathLike[str]
    """Path of the head's GGUF file, or a name from `pyfly-cpp models list`."""

    draft_max: int | None = None
    """At most the length of a block in the file; None: that many, 15 at most."""

    p_min: float = 0.0

    label: ClassVar[str] = "DFlash"

    def open(self, host: Host) -> _native.Drafter:
        what = f"{self.label} head"
        require_gguf(path := model_file(self.model_path, what), what)
        k = 0 if self.draft_max is None else host.draft_max
        return _native.ModelDrafter(self.label, self.word, host.target(), path, self.p_min, k, **host.settings)

    def __str__(self) -> str:
        return f"{self.label} head {os.path.basename(self.model_path)}"


@dataclass(frozen=True)
class DSpark(DFlash):
    """A DSpark head: a DFlash head with a Markov head, which lets each token of a block follow the one before. Most
    files have a confidence head as well: with `p_min` above 0 a draft ends as soon as its confidence is lower.
    """

    word = "dspark"
    noun = "a DSpark head"
    label = "DSpark"
