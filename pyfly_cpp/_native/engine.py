"""The engine: the round loop of `csrc/engine.cpp`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pyfly_cpp._native import boundary
from pyfly_cpp._native.boundary import FloatArray, Handle, TokenArray, check, token_pointer, void_pointer
from pyfly_cpp._native.drafters import Drafter
from pyfly_cpp._native.library import ffi, lib
from pyfly_cpp._native.model import Target
from pyfly_cpp._native.verify import GateNodes, WindowConfig, gate_array


class RawRecord(NamedTuple):
    """`pyfly_record` of pyfly.h, with the drafts that were rejected there."""

    position: int
    token: int
    origin: int
    choice: int
    depth: int
    reason: int
    round: int
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
    rounds_at: tuple[int, ...]


class Engine(Handle):
    """The round loop of one sequence on one target. Must be closed before its target and drafter are."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._drafters: list[tuple[Drafter, int]] = []
        self._sampler: Any = None  # what the running sequence's copy of the chain calls back into
        self.has_sequence = False
        """Whether a sequence runs: from `begin` to `end`, also after an error."""
        super().__init__(lib.pyfly_engine_new, lib.pyfly_engine_free, "pyfly_engine", target.pointer)
        self._n_left = ffi.new("size_t *")
        self._n_records = ffi.new("size_t *")
        self._stats = ffi.new("pyfly_stats *")

    def configure(
        self,
        gate: GateNodes,
        window: WindowConfig,
        drafters: Sequence[tuple[Drafter, int]] = (),
        *,
        adaptive: bool = False,
        loop_guard: bool = False,
        trace: bool = False,
        keep_rows: bool = False,
        resumable: bool = False,
    ) -> None:
        """Sets what the next sequence uses; an error changes nothing. `drafters` are given with their draft_max."""
        nodes = gate_array(gate)
        config = ffi.new(
            "pyfly_engine_config *",
            {
                "gate": nodes,
                "n_gate": len(nodes),
                "window": window,
                "adaptive": int(adaptive),
                "loop_guard": int(loop_guard),
                "trace": int(trace),
                "keep_rows": int(keep_rows),
                "resumable": int(resumable),
            },
        )
        natives = ffi.new("pyfly_engine_drafter[]", [(drafter.pointer, k) for drafter, k in drafters])
        check(lib.pyfly_engine_configure, self.pointer, config, natives, len(natives))
        self._drafters = list(drafters)

    def begin(self, history: Any, n_evaluated: int = 0, sampler: Any = None) -> None:
        """Starts a sequence of which the target's memory holds the first n_evaluated tokens. `sampler` is a
        llama_cpp LlamaSampler, whose chain is copied and whose Python functions are kept alive, or None for the argmax.
        An error leaves the sequence as it was that ran before, unless the target's memory could not be rolled back."""
        array = boundary.tokens("the prompt", history)
        chain = ffi.NULL if sampler is None else void_pointer(sampler.sampler)
        check(lib.pyfly_engine_begin, self.pointer, token_pointer(array), len(array), n_evaluated, chain)
        self._sampler = sampler  # not before: the copy that was replaced called back into the old one
        self.has_sequence = True

    def resume(self, n_keep: int, tokens: Any) -> None:
        """Goes on behind the first n_keep tokens, which end with one that the last round committed, with the caller's
        tokens; the sampler is as it was there."""
        array = boundary.tokens("what was sent", tokens)
        check(lib.pyfly_engine_resume, self.pointer, n_keep, token_pointer(array), len(array))

    def prefill(self, all_rows: bool = False) -> int:
        """Evaluates at most one batch of the prompt; returns how many tokens are left to do so."""
        check(lib.pyfly_engine_prefill, self.pointer, int(all_rows), self._n_left)
        return int(self._n_left[0])

    def prompt_row(self, position: int, n_vocab: int) -> FloatArray | None:
        """A copy of the raw logits row that follows a prompt token of the last prefill with all_rows."""
        return self._row(lib.pyfly_engine_prompt_row(self.pointer, position), n_vocab)

    def round(self, n_room: int = 2**31 - 1) -> int:
        """One round; returns how many tokens it committed."""
        check(lib.pyfly_engine_round, self.pointer, n_room, self._n_records)
        return int(self._n_records[0])

    def tokens(self) -> list[tuple[int, int]]:
        """(position, token) of what the last round committed."""
        records = lib.pyfly_engine_records(self.pointer)
        return [(records[i].position, records[i].token) for i in range(self._n_records[0])]

    def record(self, i: int) -> RawRecord:
        """Record i of the last round."""
        r = lib.pyfly_engine_records(self.pointer)[i]
        rejected = lib.pyfly_engine_rejected(self.pointer)
        return RawRecord(
            r.position, r.token, r.origin, r.choice, r.depth, r.reason, r.round, r.entropy, r.margin, r.logprob,
            tuple(rejected[j] for j in range(r.rejected_begin, r.rejected_end)),
        )  # fmt: skip

    def record_row(self, i: int, n_vocab: int) -> FloatArray | None:
        """A copy of the raw logits row behind record i of the last round; None unless rows are kept."""
        return self._row(lib.pyfly_engine_record_row(self.pointer, i), n_vocab)

    @staticmethod
    def _row(pointer: Any, n_vocab: int) -> FloatArray | None:
        if pointer == ffi.NULL:
            return None
        row: FloatArray = np.frombuffer(ffi.buffer(pointer, n_vocab * 4), dtype=np.float32).copy()
        return row

    def history(self) -> TokenArray:
        """A copy of every token the engine holds; inside a logits processor: the tokens before the row it sees."""
        n = ffi.new("size_t *")
        pointer = lib.pyfly_engine_history(self.pointer, n)
        return np.frombuffer(ffi.buffer(pointer, n[0] * 4), dtype=np.int32).copy() if n[0] else np.zeros(0, np.int32)

    @property
    def n_evaluated(self) -> int:
        """Positions of the sequence that the target's memory holds."""
        return int(lib.pyfly_engine_n_evaluated(self.pointer))

    def park(self, n_keep: int) -> None:
        """Makes the target's memory hold exactly n_keep positions, for others to look at between two rounds."""
        check(lib.pyfly_engine_park, self.pointer, n_keep)

    def end(self, n_keep: int) -> None:
        """Ends the sequence; the target's memory keeps at most its first n_keep positions."""
        try:
            check(lib.pyfly_engine_end, self.pointer, n_keep)
        finally:
            self._sampler = None
            self.has_sequence = False

    def counters(self) -> dict[str, Any]:
        """The counters as fields of `pyfly_cpp.Stats`."""
        s = self._stats
        lib.pyfly_engine_stats(self.pointer, s)
        drafted = list(s.drafted_at)
        n_depth = max((i + 1 for i, n in enumerate(drafted) if n), default=0)
        names = (
            "rounds", "drafted", "committed", "matched", "loose_accepted", "rejected_gate", "rejected_window",
            "rejected_boundary", "rejected_safety", "rejected_loop", "loops", "rollbacks", "rolled_back",
            "window_fallbacks", "prefilled", "replayed", "checkpoints",
        )  # fmt: skip
        return {
            **{name: int(getattr(s, name)) for name in names},
            "drafted_at_depth": tuple(drafted[:n_depth]),
            "accepted_at_depth": tuple(list(s.accepted_at)[:n_depth]),
            "accepted_by": tuple(s.accepted_by),
            "mean_margin_loose": s.sum_margin_loose / s.loose_accepted if s.loose_accepted else math.nan,
            "mean_margin_rejected": s.sum_margin_rejected / s.n_margin_rejected if s.n_margin_rejected else math.nan,
            **{f"seconds_{part}": getattr(s, f"us_{part}") / 1e6 for part in ("prefill", "draft", "verify", "gate")},
        }

    def accepted(self) -> tuple[int, int, int]:
        """The counters drafted, matched and loose_accepted: cheap enough for every round."""
        lib.pyfly_engine_stats(self.pointer, self._stats)
        return int(self._stats.drafted), int(self._stats.matched), int(self._stats.loose_accepted)

    def governor(self) -> GovernorState:
        """What the governor has learned."""
        state = ffi.new("pyfly_governor_state *")
        lib.pyfly_engine_governor(self.pointer, state)
        most = lib.PYFLY_MAX_DEPTH
        depths = [min(k, most) for _, k in self._drafters]
        n_rows = max(depths, default=0) + 1

        def by_drafter(values: Any, scale: float) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(values[i * most + j] * scale for j in range(k)) for i, k in enumerate(depths))

        return GovernorState(
            target_seconds=tuple(us / 1e6 for us in list(state.target_us)[:n_rows]),
            draft_seconds=by_drafter(state.draft_us, 1e-6),
            catch_up_seconds=tuple(state.catch_up_us[i] / 1e6 for i in range(len(depths))),
            acceptance=by_drafter(state.acceptance, 1.0),
            rounds_at=tuple(list(state.rounds_at)[:n_rows]),
        )

    def reset_counters(self) -> None:
        """Sets all counters to 0."""
        lib.pyfly_engine_reset_stats(self.pointer)
