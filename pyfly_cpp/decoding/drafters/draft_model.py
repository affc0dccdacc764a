"""Drafters with a model: what they share, and the draft model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pyfly_cpp import _native
from pyfly_cpp.decoding.drafters.drafter import AnyOption, Host, NamesOption, Option, OwnDrafter
from pyfly_cpp.machine.cache_types import require_cache_types
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.machine.placement import Placement, require_names
from pyfly_cpp.machine.threads import AUTO, require_threads
from pyfly_cpp.models.named import model_file
from pyfly_cpp.ranges import require_integer, require_number

P_MIN = Option("p_min", "p_min", 0.0, "Draft model: stop when its top probability falls below this.", 1.0, 0.0)


class WithModel(OwnDrafter):
    """The base of those with a model."""

    takes_file = has_distributions = True
    options: ClassVar[tuple[AnyOption, ...]] = (P_MIN,)
    model_path: str | os.PathLike[str] | None
    p_min: float
    """Stop drafting when its top probability falls under this, in [0, 1]. 0 never stops early."""

    def __post_init__(self) -> None:
        if self.model_path is not None:
            object.__setattr__(self, "model_path", os.fspath(self.model_path))
        if self.draft_max is not None:
            require_integer("draft_max", self.draft_max, 1)
        require_number("p_min", self.p_min, 1.0)


@dataclass(frozen=True)
class DraftModel(WithModel):
    """A second, cheaper GGUF model of the same vocabulary, decoded greedily with a KV cache of its own."""

    word = "draft"
    noun = "a draft model"
    needs_file = takes_draft = True
    draft_most = 8
    options: ClassVar[tuple[AnyOption, ...]] = (
        P_MIN,
        Option("draft_n_ctx", "n_ctx", 16, "Draft model: its context.  [default: the target's]"),
        NamesOption("draft_devices", "devices", "Draft model: as --devices.  [default: this machine's]"),
    )

    model_path: str | os.PathLike[str]
    """Path of the GGUF file, or a name from `pyfly-cpp models list`."""

    draft_max: int | None = None
    p_min: float = 0.0

    n_ctx: int | None = None
    """Context of the draft in tokens, >= 16; None: the target's. A smaller one drafts from its most recent window."""

    n_batch: int | None = None
    """Largest batch in tokens, >= 1; None: the target's."""

    n_gpu_layers: int | None = None
    """Layers on the GPU, -1 for all; None: as the target."""

    n_threads: int | str | None = None
    """Threads, 1..512; None or "auto": the target's, as they change."""

    type_k: int | None = None
    """ggml type of the K cache, one of `cache_types.CACHE_TYPES`; None: F16."""

    type_v: int | None = None
    """ggml type of the V cache likewise; a quantised one needs a target with flash_attn=True."""

    devices: Sequence[str] | None = None
    """Where it is put, as `FlyLlama(devices=...)`, RPC servers included; None: on this machine, where llama.cpp puts
    it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_threads == AUTO:
            object.__setattr__(self, "n_threads", None)
        for name, low in (("n_ctx", 16), ("n_batch", 1), ("n_gpu_layers", -1)):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), low)
        if self.n_threads is not None:
            require_threads(self.n_threads)
        require_cache_types(self.type_k, self.type_v)
        if self.devices is not None:
            object.__setattr__(self, "devices", require_names("devices", self.devices))

    def open(self, host: Host) -> _native.Drafter:
        return self.open_as("draft model", "model", host)

    def open_as(self, name: str, kind: str, host: Host) -> _native.Drafter:
        """Opens it by another constructor: see `_native.ModelDrafter`."""
        require_gguf(path := model_file(self.model_path, "draft model"), "draft model")
        names = ("n_ctx", "n_batch", "n_gpu_layers", "n_threads", "type_k", "type_v")
        given = {name: int(getattr(self, name)) for name in names if getattr(self, name) is not None}
        settings = {**host.settings, **({"n_gpu_layers": -1} if self.devices else {}), **given}
        devices = Placement(devices=self.devices).addresses
        return _native.ModelDrafter(name, kind, host.target(), path, self.p_min, devices=devices, **settings)

    def __str__(self) -> str:
        return f"draft model {os.path.basename(self.model_path)}"
