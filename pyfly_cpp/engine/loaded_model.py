"""`LoadedModel`: a model in memory, by public names: for requests, for embeddings, and for questions about it.

`llama/` makes it, from a `llama_cpp.Llama` that has loaded: nobody else reads the private attributes of one.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import llama_cpp

from pyfly_cpp._native import Drafter
from pyfly_cpp.decoding import EXACT, Decoding
from pyfly_cpp.decoding.gates import why_all, why_beyond, why_strict
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.engine.access import Access
from pyfly_cpp.engine.costs import expect_costs, setup_of
from pyfly_cpp.engine.decoder import Decoder
from pyfly_cpp.engine.vocabulary import Vocabulary
from pyfly_cpp.errors import PyflyError


@dataclass(eq=False)
class LoadedModel:
    """A loaded model. It is freed with the `llama_cpp.Llama` that it was loaded by, not with this."""

    path: str
    """The GGUF file."""
    metadata: dict[str, str]
    """The metadata of the file, by key."""
    native: Any
    """The llama_model, as llama_cpp has it."""
    model_params: Any
    """The llama_model_params that it was loaded with."""
    context_params: Any
    """The llama_context_params of its context."""
    vocabulary: Vocabulary
    """Its tokens."""
    lora: Any
    """The LoRA adapter that it was loaded with, as llama_cpp has it; None: without."""
    lora_scale: float
    """The scale of the adapter."""
    lora_path: str | None
    """The file of the adapter; None: without."""
    on_close: Callable[..., Any]
    """Registers a function and its arguments, to be called before the model is freed; the newest first."""
    access: Access
    """The lock around its use."""
    decoder: Decoder
    """Its native side."""
    n_parallel: int
    """Requests that run at a time."""
    n_ctx: int
    """Most tokens of one request, prompt and answer."""
    n_batch: int
    """Most tokens of a step."""
    changes: tuple[object, ...]
    """Other conditions of its costs, for `setup_of`."""
    verbose: bool
    decoding: Decoding = EXACT
    """How requests decode by default. Its drafter changes by `draft_with`."""
    resolved: Resolved = Resolved()  # noqa: RUF009 - frozen
    """The drafters and the reason for them. They change by `draft_with`."""
    _warned: set[str] = field(default_factory=set)

    @property
    def is_governed(self) -> bool:
        """Whether the governor chooses drafter and length."""
        return self.decoding.is_governed_with(self.resolved.drafters)

    def draft_lengths(self, decoding: Decoding) -> list[int]:
        """Most tokens that each drafter proposes in a step of a request with this setting, 0..n_batch - 1. Only whether
        the governor chooses is not the request's own."""
        return self.resolved.lengths(decoding.draft_max, self.is_governed, self.n_batch)

    @property
    def draft_max(self) -> int:
        """Most tokens that are drafted in a step."""
        return max(self.draft_lengths(self.decoding), default=0)

    def opened(self, wanted: Resolved) -> tuple[Resolved, list[Drafter]]:
        """Opens drafters: the drafters, without those that may be left out if one cannot be opened, and their native
        ones. Raises ValueError, PyflyError or MemoryError if a needed one cannot be opened."""
        k, is_fixed = self.decoding.draft_max, not self.decoding.adaptive
        try:
            return wanted, self.decoder.open_drafters(wanted.drafters, k, self.n_batch, is_fixed)
        except (PyflyError, ValueError, MemoryError):
            if not wanted.may_be_left_out:
                raise
            return self.opened(wanted.needed)

    def draft_with(self, resolved: Resolved, opened: list[Drafter], given: Any) -> None:
        """Takes over the result of `opened`; no request may run. `given`: how `decoding` is to name them."""
        self.decoder.drafters = opened
        self.resolved = resolved
        self.decoding = replace(self.decoding, drafter=given)

    def configure(self, may_measure: bool) -> None:
        """Sets what the next request drafts with. The governor gets to know what that costs; `may_measure`: the context
        holds nothing that would be lost."""
        decoder, is_governed = self.decoder, self.is_governed
        drafters = list(zip(self.resolved.drafters, self.draft_lengths(self.decoding)))
        decoder.batch.configure([(one, k) for one, (_, k) in zip(decoder.drafters, drafters)], adaptive=is_governed)
        if is_governed and drafters and not decoder.knows_costs:
            setup = setup_of(self.path, drafters, self.model_params, self.context_params, self.changes)
            decoder.knows_costs = expect_costs(decoder.batch, setup, may_measure=may_measure, verbose=self.verbose)

    def warn_of_gate(self) -> None:
        """Warns, once of each, of a gate that with this window and draft length can accept nothing loosely, of one
        whose threshold lets everything pass, and of a margin larger than advised."""
        gate, n = self.decoding.gate, self.draft_max
        for why in (why_strict(gate, self.decoding.effective_window, n), why_all(gate, n), why_beyond(gate, n)):
            if why is not None and why not in self._warned:
                self._warned.add(why)
                warnings.warn(why, stacklevel=3)

    def apply_lora(self, context: Any) -> bool:
        """Has another context of this model apply the LoRA adapter, if there is one; False: it does not fit."""
        if self.lora is None:
            return True
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self.lora)
        scales = (ctypes.c_float * 1)(self.lora_scale)
        code: int = llama_cpp.llama_set_adapters_lora(context, adapters, 1, scales)
        return code == 0
