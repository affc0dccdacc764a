"""The batch: several requests on one target, `csrc/batch.cpp`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from pyfly_cpp._native import boundary
from pyfly_cpp._native.boundary import FloatArray, NativeHandle, TokenArray, check, failure, token_pointer, void_pointer
from pyfly_cpp._native.counters import Counters
from pyfly_cpp._native.drafters import Drafter
from pyfly_cpp._native.library import ffi, lib
from pyfly_cpp._native.targets import Target
from pyfly_cpp._native.verification import GateNodes, WindowConfig, gate_array, window_fields


class RawRecord(NamedTuple):
    """`pyfly_record` of pyfly.h, with the drafts that were rejected there."""

    position: int
    token: int
    origin: int
    choice: int
    depth: int
    reason: int
    step: int
    entropy: float
    margin: float
    logprob: float
    rejected: tuple[int, ...]


class GovernorState(NamedTuple):
    """`pyfly_governor_state` of pyfly.h in seconds, cut to the lengths in use; drafters in the order of `configure`."""

    target_seconds: tuple[float, ...]
    draft_seconds: tuple[tuple[float, ...], ...]
    catch_up_seconds: tuple[float, ...]
    acceptance: tuple[tuple[float, ...], ...]
    steps_at: tuple[int, ...]


class Costs(NamedTuple):
    """`pyfly_costs` of pyfly.h: the cost of batches and drafts, in microseconds; drafters by their place."""

    rows: tuple[tuple[int, float], ...]
    """(rows, microseconds) of batches of the target."""
    drafts: tuple[tuple[int, int, int, float], ...]
    """(drafter, requests, tokens for each, microseconds) of drafts."""
    catch_up: tuple[float, ...]
    """Microseconds of evaluating one token that a drafter has missed; 0 if not known, or free."""
    change: float = 0.0
    """Microseconds more for a batch of the target whose size is not that of the one before."""


class SlotProgress(NamedTuple):
    """`pyfly_progress` of pyfly.h: what an iteration did for a request."""

    slot: int
    n_records: int
    is_step: bool
    is_waiting: bool
    failure: BaseException | None


TakeFailure = Callable[[], Optional[BaseException]]


def _no_failure() -> None:
    """The failure check of a sampler without Python functions."""


class Batch(NativeHandle):
    """Several requests on one target. Must be closed before its target and drafters are."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.drafters: list[tuple[Drafter, int]] = []
        super().__init__(lib.pyfly_batch_new, lib.pyfly_batch_free, "pyfly_batch", target.pointer)
        self.slots = [Slot(self, i) for i in range(target.n_sequences)]
        self._progress = ffi.new("pyfly_progress[]", len(self.slots))
        self._n_progress = ffi.new("size_t *")

    def configure(
        self,
        drafters: Sequence[tuple[Drafter, int]] = (),
        *,
        adaptive: bool = False,
        n_chunk: int = 0,
        us_chunk: int = 0,
    ) -> None:
        """Sets what requests draft with, each drafter with its draft_max; not while one runs. An error changes nothing.
        n_chunk, us_chunk: of prompts, as in `pyfly_batch_config`."""
        natives = ffi.new("pyfly_batch_drafter[]", [(drafter.pointer, k) for drafter, k in drafters])
        config = ffi.new("pyfly_batch_config *", {"adaptive": int(adaptive), "n_chunk": n_chunk, "us_chunk": us_chunk})
        check(lib.pyfly_batch_configure, self.pointer, config, natives, len(natives))
        self.drafters = list(drafters)

    def measure(self) -> Costs:
        """The costs of batches of the target and of drafts, on made-up tokens. Not while a request runs; what the slots
        hold is dropped, also by an error."""
        costs = ffi.new("pyfly_costs *")
        check(lib.pyfly_batch_measure, self.pointer, costs)
        return Costs(
            tuple((rows.n, rows.us) for rows in costs.rows[0 : costs.n_rows]),
            tuple((d.drafter, d.n_requests, d.k, d.us) for d in costs.drafts[0 : costs.n_drafts]),
            tuple(costs.catch_up_us[0 : len(self.drafters)]),
            costs.change_us,
        )

    def expect(self, costs: Costs) -> None:
        """What the governor expects until other drafters are configured; ValueError for what cannot be."""
        given = {
            "n_rows": len(costs.rows), "rows": list(costs.rows), "n_drafts": len(costs.drafts),
            "drafts": list(costs.drafts), "catch_up_us": list(costs.catch_up),
            "change_us": costs.change,
        }  # fmt: skip
        try:
            native = ffi.new("pyfly_costs *", given)
        except (IndexError, OverflowError, TypeError) as error:
            raise ValueError(f"these are not costs ({error}).") from None
        check(lib.pyfly_batch_expect, self.pointer, native)

    def find_slot(self, history: Any, owner: int = 0) -> Slot | None:
        """The free slot that a request of this owner continues; else an empty one, else the one that was used longest
        ago."""
        array = boundary.tokens("the prompt", history)
        slot = lib.pyfly_batch_find_slot(self.pointer, token_pointer(array), len(array), owner)
        return self.slots[slot] if slot >= 0 else None

    def step(self) -> list[SlotProgress]:
        """One iteration: every running request continues with a chunk of its prompt or with a step; ValueError if none
        runs."""
        check(lib.pyfly_batch_step, self.pointer, self._progress, self._n_progress)
        return [
            SlotProgress(p.slot, p.n_records, bool(p.is_step), bool(p.is_waiting), self._failure(p.slot, p.status))
            for p in self._progress[0 : self._n_progress[0]]
        ]

    def step_alone(self) -> Any:
        """An iteration for the only request that runs: its `pyfly_progress`, which the next one overwrites; raises what
        stopped it."""
        check(lib.pyfly_batch_step, self.pointer, self._progress, self._n_progress)
        if self._n_progress[0] != 1:
            raise ValueError("another request runs in this batch; step all of them.")
        progress = self._progress[0]
        reported = self._failure(progress.slot, progress.status)
        if reported is not None:
            raise reported
        return progress

    def governor(self) -> GovernorState:
        """The governor's knowledge."""
        state = ffi.new("pyfly_governor_state *")
        lib.pyfly_batch_governor(self.pointer, state)
        most = lib.PYFLY_MAX_DEPTH
        depths = [min(k, most) for _, k in self.drafters]
        n_rows = max(depths, default=0) + 1

        def by_drafter(values: Any, scale: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(values[i * most + j] * scale for j in range(k)) for i, k in enumerate(depths))

        return GovernorState(
            target_seconds=tuple(us / 1e6 for us in list(state.target_us)[:n_rows]),
            draft_seconds=by_drafter(state.draft_us, 1e-6),
            catch_up_seconds=tuple(state.catch_up_us[i] / 1e6 for i in range(len(depths))),
            acceptance=by_drafter(state.acceptance, 1.0),
            steps_at=tuple(list(state.steps_at)[:n_rows]),
        )

    def _failure(self, slot: int, status: int) -> BaseException | None:
        # What Python raised behind the end of a step is the next step's, if there is one.
        if status == lib.PYFLY_OK:
            return None
        return self.slots[slot].take_failure() or failure(lib.pyfly_batch_failure, self.pointer, slot)


class Slot:
    """A place in a batch, and the request that runs there."""

    def __init__(self, batch: Batch, number: int) -> None:
        self._batch = weakref.proxy(batch)
        self.number = number
        self._sampler: Any = None  # what the running request's copy of the chain calls back into
        self.take_failure: TakeFailure = _no_failure
        """Returns, once, what the Python functions of the running request's sampler raised."""
        self.has_request = False
        """Whether a request runs: from `begin` to `end`, also after an error."""
        self._size = ffi.new("size_t *")

    @property
    def _pointer(self) -> Any:
        return self._batch.pointer

    def begin(
        self,
        history: Any,
        gate: GateNodes,
        window: WindowConfig,
        *,
        n_evaluated: int | None = None,
        sampler: Any = None,
        take_failure: TakeFailure | None = None,
        n_room: int | None = None,
        draft_max: Sequence[int] | None = None,
        **settings: int,
    ) -> None:
        """A request begins of which the target's memory holds the first n_evaluated tokens (None: as many as the batch
        knows of). `sampler` is a llama_cpp LlamaSampler, whose
        chain is copied and whose Python functions are kept alive, or None for the argmax; what these raise cannot pass
        through C: they forbid every token, and `take_failure` returns it once that has stopped the request. `n_room`:
        as of `want`, None: no limit. `draft_max`: one for each drafter, or None for those of the batch. `settings`:
        fields of `pyfly_request_settings`, such as `trace`.
        An error leaves the request as it was that ran before, unless the target's memory could not be cut."""
        array = boundary.tokens("the prompt", history)
        nodes = gate_array(gate)
        limits = ffi.NULL if draft_max is None else ffi.new("int32_t[]", list(draft_max))
        if draft_max is not None and len(draft_max) != len(self._batch.drafters):
            raise ValueError(f"give a draft_max for each of the {len(self._batch.drafters)} drafters.")
        request = ffi.new(
            "pyfly_request *",
            {
                "history": token_pointer(array),
                "n_history": len(array),
                "n_evaluated": -1 if n_evaluated is None else n_evaluated,
                "sampler_chain": ffi.NULL if sampler is None else void_pointer(sampler.sampler),
                "gate": nodes,
                "n_gate": len(nodes),
                "draft_max": limits,
                "settings": {"window": window_fields(window), **settings},
            },
        )
        # What a signal handler raises may come right behind the call. If it has done its work, the request can be
        # ended then, and both samplers are there: copies of either may call back into theirs.
        had_request, before = self.has_request, self._sampler
        self.has_request, self._sampler = True, (before, sampler)
        error = failure(lib.pyfly_batch_begin, self._pointer, self.number, request)
        if error is not None:
            self.has_request, self._sampler = had_request, before
            raise error
        self._sampler = sampler
        self.take_failure = take_failure or _no_failure
        if n_room is not None:
            self.want(n_room)

    def resume(self, n_keep: int, tokens: Any) -> None:
        """Goes on behind the first n_keep tokens, which end with one that the last step committed, with the caller's
        tokens; the sampler is as it was there."""
        array = boundary.tokens("what was sent", tokens)
        check(lib.pyfly_batch_resume, self._pointer, self.number, n_keep, token_pointer(array), len(array))

    def want(self, n_room: int) -> None:
        """At most n_room more tokens are wanted, >= 1."""
        check(lib.pyfly_batch_want, self._pointer, self.number, n_room)

    @property
    def n_left(self) -> int:
        """Tokens to evaluate before the next step; 0: the next iteration brings it."""
        check(lib.pyfly_batch_n_left, self._pointer, self.number, self._size)
        return int(self._size[0])

    # ---- What the last step brought ----------------------------------------------------------------------------------

    def prompt_row(self, position: int, n_vocab: int) -> FloatArray | None:
        """A copy of the raw logits row that follows a prompt token of the last step, with all_rows."""
        return self._row(lib.pyfly_batch_prompt_row(self._pointer, self.number, position), n_vocab)

    def tokens(self) -> list[tuple[int, int]]:
        """(position, token) of what was committed."""
        records = lib.pyfly_batch_records(self._pointer, self.number, self._size)
        return [(records[i].position, records[i].token) for i in range(self._size[0])]

    def record(self, i: int) -> RawRecord:
        """Record i."""
        r = lib.pyfly_batch_records(self._pointer, self.number, self._size)[i]
        rejected = lib.pyfly_batch_rejected(self._pointer, self.number)
        return RawRecord(
            r.position, r.token, r.origin, r.choice, r.depth, r.reason, r.step, r.entropy, r.margin, r.logprob,
            tuple(rejected[j] for j in range(r.rejected_begin, r.rejected_end)),
        )  # fmt: skip

    def record_row(self, i: int, n_vocab: int) -> FloatArray | None:
        """A copy of the raw logits row behind record i; None unless rows are kept."""
        return self._row(lib.pyfly_batch_record_row(self._pointer, self.number, i), n_vocab)

    @staticmethod
    def _row(pointer: Any, n_vocab: int) -> FloatArray | None:
        if pointer == ffi.NULL:
            return None
        row: FloatArray = np.frombuffer(ffi.buffer(pointer, n_vocab * 4), dtype=np.float32).copy()
        return row

    def history(self) -> TokenArray:
        """A copy of every token of the request; inside a logits processor: the tokens before the row it sees."""
        n = ffi.new("size_t *")
        pointer = lib.pyfly_batch_history(self._pointer, self.number, n)
        return np.frombuffer(ffi.buffer(pointer, n[0] * 4), dtype=np.int32).copy() if n[0] else np.zeros(0, np.int32)

    @property
    def n_evaluated(self) -> int:
        """Positions of the slot that the target's memory holds."""
        return int(lib.pyfly_batch_n_evaluated(self._pointer, self.number))

    def kept(self, tokens: Any) -> list[tuple[int, bytes]]:
        """(n, copy of the state behind the first n of these tokens) of what is kept of a recurrent memory, the shortest
        first; empty for other memories. `tokens`: what the context holds; what is kept of others is forgotten."""
        out = []
        n, n_bytes = ffi.new("int32_t *"), ffi.new("size_t *")
        array = boundary.tokens("the tokens of the context", tokens)
        for i in range(lib.pyfly_batch_n_kept(self._pointer, self.number, token_pointer(array), len(array))):
            state = lib.pyfly_batch_kept(self._pointer, self.number, i, n, n_bytes)
            out.append((int(n[0]), bytes(ffi.buffer(state, n_bytes[0]))))
        return out

    def restore_kept(self, tokens: Any, state: bytes) -> None:
        """Gives back the state behind these tokens, which the context was restored to begin with; while no request
        runs. Nothing happens to other memories."""
        array = boundary.tokens("the tokens of a kept state", tokens)
        check(
            lib.pyfly_batch_restore_kept, self._pointer, self.number, token_pointer(array), len(array),
            ffi.from_buffer("uint8_t[]", state), len(state),
        )  # fmt: skip

    def park(self, n_keep: int) -> None:
        """Makes the target's memory hold exactly n_keep positions, for others to look at between two steps."""
        check(lib.pyfly_batch_park, self._pointer, self.number, n_keep)

    def end(self, n_keep: int = -1) -> None:
        """Ends the request; the target's memory keeps its first n_keep positions, or, -1, what it holds of the
        committed tokens."""
        error = failure(lib.pyfly_batch_end, self._pointer, self.number, n_keep)
        # Not if a signal handler's exception has come instead: then it can be ended again.
        self._sampler = None
        self.take_failure = _no_failure
        self.has_request = False
        if error is not None:
            raise error

    # ---- Counters ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Counters:
        """The counters as they are now."""
        return Counters.of(self._pointer, self.number)

    def counters(self) -> dict[str, Any]:
        """The counters, as of `Counters.fields`."""
        return self.snapshot().fields()

    def accepted(self) -> tuple[int, int, int]:
        """The counters drafted, matched and loose_accepted: cheap enough for every step."""
        return self.snapshot().accepted

    def reset_counters(self) -> None:
        """Sets all counters to 0."""
        lib.pyfly_batch_reset_stats(self._pointer, self.number)
