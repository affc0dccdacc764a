"""`Decoder`: the native side of a loaded model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.decoding import EXACT
from pyfly_cpp.decoding.drafters import Drafter, Host, open_drafter
from pyfly_cpp.decoding.resolve import draft_max_of
from pyfly_cpp.engine.access import CLOSED
from pyfly_cpp.engine.adapters import applied
from pyfly_cpp.engine.stats import Governor, Stats, Threads
from pyfly_cpp.machine.processes import note_computing


class Decoder:
    """Target, batch and drafters of one context, and what they have counted.

    Must be closed before the context is. Target and batch are made when they are first needed. A FlyLlama is a batch of
    one: its request is in the only slot.
    """

    def __init__(
        self,
        context: Any,
        *,
        protected: Iterable[int],
        markers: Sequence[str],
        adapts: tuple[bool, bool],
        has_own_head: bool,
        n_requests: int,
        n_ctx: int,
        settings: dict[str, int],
        tap: _native.LayerTap | None,
    ) -> None:
        """
        Args:
            context: A llama_context as llama_cpp holds it (a ctypes pointer).
            protected: Token ids that are never accepted loosely, besides those the vocabulary names.
            markers: Texts that no token may begin or continue loosely.
            adapts: Whether the thread counts, for one token and for batches, follow the load of the machine.
            has_own_head: Whether the model is loaded with the MTP head of its file.
            n_requests: Requests at a time.
            n_ctx: Most tokens of one request; 0: as many as the context holds.
            settings: How it was loaded, as fields of `pyfly_draft_model_config` of pyfly.h.
            tap: What the context calls while it evaluates.
        """
        self._context = context
        self._protected = protected
        self.markers = tuple(markers)
        """Texts that no token may begin or continue loosely."""
        self._adapts = adapts
        self._has_own_head = has_own_head
        self._limits = n_requests, n_ctx
        self._settings = settings
        self._tap = tap
        self.computed_with = applied(context)
        """The adapters that the context's memory was computed with."""
        self._target: _native.LlamaTarget | None = None
        self._batch: _native.Batch | None = None
        self._drafters: list[_native.Drafter] = []
        self._accepted_earlier: dict[str, int] = {}
        self._warned_plain = False
        self.knows_costs = False
        """Whether the governor knows the cost of batches and drafts, or nobody can tell it."""
        self._at_end = Stats()
        self.python_seconds = 0.0
        """Time that a generation's own Python took."""

    @property
    def target(self) -> _native.LlamaTarget:
        """The context as the batch sees it."""
        return self._open()[0]

    @property
    def batch(self) -> _native.Batch:
        """The batch that runs the requests."""
        return self._open()[1]

    @property
    def slot(self) -> _native.Slot:
        """The slot of a batch of one."""
        return self.batch.slots[0]

    def _open(self) -> tuple[_native.LlamaTarget, _native.Batch]:
        if self._target is None or self._batch is None:
            if self._context is None:
                raise ValueError(CLOSED)
            note_computing()
            target = _native.LlamaTarget(self._context, *self._adapts, *self._limits, self._tap)
            target.protect(self._protected)
            target.protect_texts(self.markers)
            self._target, self._batch = target, _native.Batch(target)
        return self._target, self._batch

    @property
    def running(self) -> _native.Slot | None:
        """The slot if a request runs there."""
        return self.slot if self._batch is not None and self.slot.has_request else None

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        if self.running is not None:
            with contextlib.suppress(Exception):  # what is lost is what drafters would have kept of it
                self.running.end()
        if self._batch is not None:
            with contextlib.suppress(ReferenceError):  # garbage: nobody asks any more
                self._at_end = self.describe(self.slot.snapshot(), self.python_seconds)
        for handle in (self._batch, *self._drafters, self._target):
            if handle is not None:
                handle.close()
        self._context = self._batch = self._target = None
        self._drafters = []

    # ---- Drafters ----------------------------------------------------------------------------------------------------

    def open_drafters(
        self, drafters: Sequence[Drafter], draft_max: int | None, n_batch: int, is_fixed: bool
    ) -> list[_native.Drafter]:
        """Opens all of them or none, see `open_drafter`. `draft_max`: the draft length that was asked for, if any;
        `is_fixed`: every draft is to have it, so that one that cannot draft so many refuses."""
        opened: list[_native.Drafter] = []
        try:
            for drafter in drafters:
                k = draft_max_of(drafter, draft_max, n_batch)
                opened.append(open_drafter(drafter, self._host(k, is_fixed and bool(draft_max))))
        except BaseException:
            for native in opened:
                native.close()
            raise
        return opened

    def keep_answers(self) -> None:
        """Lets prompt lookup write its file of remembered answers, if it has one."""
        for native in self._drafters:
            if isinstance(native, _native.LookupDrafter):
                native.keep()

    def _host(self, draft_max: int, is_fixed: bool) -> Host:
        def vocabulary() -> Any:
            return llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(self._context))

        return Host(lambda: self.target, draft_max, self._has_own_head, self._settings, vocabulary, is_fixed)

    @property
    def drafters(self) -> list[_native.Drafter]:
        """The drafters, the cheapest first. Assigning closes those that were there; no sequence may run, else a
        ValueError changes nothing."""
        return self._drafters

    @drafters.setter
    def drafters(self, drafters: list[_native.Drafter]) -> None:
        accepted_earlier = self._accepted_before(drafters)
        if self._batch is not None:
            self._batch.configure()  # lets go of the old ones, or raises
        old, self._drafters = self._drafters, drafters
        self._accepted_earlier = accepted_earlier
        self.knows_costs = False
        for native in old:
            native.close()

    def warn_if_plain(self, stacklevel: int) -> None:
        """Says once that a drafter is of no use. Known once a prompt was evaluated. `stacklevel`: as of
        `warnings.warn`."""
        if self._drafters and not self._warned_plain and not self.target.can_rewind:
            self._warned_plain = True
            warnings.warn(
                "this model's memory cannot be rolled back, so it is decoded without speculation.",
                stacklevel=stacklevel + 1,
            )

    @property
    def has_new_adapters(self) -> bool:
        """Whether the context applies other adapters than those that its memory was computed with."""
        return applied(self._context) != self.computed_with

    def take_adapters(self) -> None:
        """What is evaluated from now on is computed with the adapters of now; what was before is not used. While no
        request runs."""
        if self.has_new_adapters and self._batch is not None:
            self.forget()
        self.computed_with = applied(self._context)

    def forget(self) -> None:
        """No request to come is served by what is evaluated of earlier ones. While none runs."""
        for slot in self.batch.slots:
            slot.begin([0], EXACT.gate.nodes(), EXACT.gate.window.config(), n_evaluated=0)
            slot.end(0)

    # ---- Counters ----------------------------------------------------------------------------------------------------

    def stats(self, adaptive: bool) -> Stats:
        """The counters of the only slot, after `close` as they were then; `adaptive`: also what the governor has
        learned."""
        if self._batch is None:
            return self._at_end
        return self.with_state(self.describe(self.slot.snapshot(), self.python_seconds), adaptive)

    def describe(self, counters: _native.Counters, python_seconds: float) -> Stats:
        """Counters with the names of the drafters. Of all methods this one may be called while another thread steps."""
        fields = counters.fields()
        by_drafter = dict(self._accepted_earlier)
        for native, n in zip(self._drafters, fields.pop("accepted_by")):
            by_drafter[native.name] = by_drafter.get(native.name, 0) + n
        return Stats(
            rounds=fields.pop("steps"),
            **fields,
            seconds_python=python_seconds,
            accepted_by_drafter=tuple(by_drafter.items()),
        )

    def with_state(self, stats: Stats, adaptive: bool) -> Stats:
        """Adds how the threads stand and, if `adaptive`, what the governor has learned."""
        names = [native.name for native in self._drafters]
        threads = self.target.threads()
        return replace(
            stats,
            governor=Governor.of(self.batch.governor(), names) if adaptive and names else None,
            threads=None if threads is None else Threads(*threads),
        )

    def _accepted_before(self, drafters: list[_native.Drafter]) -> dict[str, int]:
        """What `stats` must add to the slot's counters, which go by place, when these drafters take the places."""
        if self._batch is None:
            return {}
        by_drafter = dict(self.stats(False).accepted_by_drafter)
        for native, n in zip(drafters, self.slot.counters()["accepted_by"]):
            by_drafter[native.name] = by_drafter.get(native.name, 0) - n
        return by_drafter

    def reset_stats(self) -> None:
        """Sets all counters to 0."""
        self.python_seconds = 0.0
        self._accepted_earlier, self._at_end = {}, Stats()
        if self._batch is not None:
            self.slot.reset_counters()
