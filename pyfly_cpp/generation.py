"""`Generation`: the loop around the rounds, from a prompt to the last token that somebody wants.

At every `yield`, `n_tokens`, `input_ids` and the KV cache are what the base class promises: the first `n_tokens` tokens
are evaluated, the yielded token is the next one. What the batch holds beyond that is invisible, and is gone as soon as
somebody else uses the context.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llama_cpp.llama import StoppingCriteriaList

from pyfly_cpp._native import RawRecord
from pyfly_cpp.errors import BusyError, ContextFullError
from pyfly_cpp.guarded_llama import GuardedLlama
from pyfly_cpp.interrupts import interrupts_deferred
from pyfly_cpp.processors import Processors
from pyfly_cpp.request import Request
from pyfly_cpp.rules import Gate
from pyfly_cpp.stats import Record, Round
from pyfly_cpp.windows import Window


def prepare_history(llm: GuardedLlama, tokens: list[int], reset: bool, request: Request) -> list[int]:
    """All tokens that a generation begins with: these, or these behind what `llm` holds (not `reset`).

    Raises:
        ValueError: there are none.
        ContextFullError: they do not fit in the context.
    """
    history = tokens if reset else [*llm._input_ids.tolist(), *tokens]
    if not history:
        raise ValueError("the prompt is empty; give at least one token.")
    if len(history) > llm._n_ctx:
        raise ContextFullError(
            f"the prompt has {len(history)} tokens and the context holds {llm._n_ctx}; shorten the prompt or "
            "raise n_ctx."
        )
    if request.prompt_logprobs is not None:
        llm.n_tokens = 0  # the prompt's rows are wanted: nothing of it may come from the cache
    return history


class Text(Protocol):
    """The place of a text in a batch: a native `Slot`, or what stands for one in another thread."""

    @property
    def begin(self) -> Callable[..., None]:
        """As of `Slot`."""

    def resume(self, n_keep: int, tokens: Any) -> None:
        """As of `Slot`."""

    def prefill(self) -> int:
        """Something more of the prompt is evaluated; returns how many tokens are left."""

    def round(self) -> int:
        """One round; returns how many tokens came."""

    def prompt_row(self, position: int, n_vocab: int) -> npt.NDArray[np.float32] | None:
        """The row behind a prompt token of the last `prefill`."""

    def tokens(self) -> list[tuple[int, int]]:
        """(position, token) of the last round's."""

    def record(self, i: int) -> RawRecord:
        """How token i of the last round came."""

    def record_row(self, i: int, n_vocab: int) -> npt.NDArray[np.float32] | None:
        """The row behind it."""

    def history(self) -> npt.NDArray[np.int32]:
        """All tokens; inside a logits processor: those before the row it sees."""

    def accepted(self) -> tuple[int, int, int]:
        """The counters drafted, matched and loose_accepted."""

    @property
    def n_evaluated(self) -> int:
        """Positions that the target's memory holds."""


class Generation:
    """One generation of a model, as long as it is the current one: `begin`, then `run`."""

    def __init__(
        self,
        llm: GuardedLlama,
        text: Text,
        request: Request,
        *,
        processors: Processors | None,
        stopping_criteria: StoppingCriteriaList | None,
        trace: bool,
        log_rounds: bool,
        on_prefill: Callable[[int, int], None] | None,
    ) -> None:
        self._llm = llm
        self._access = llm._access
        self._decoder = llm._decoder
        self._text = text
        self._number = llm._access.generation
        self._step = llm._access.step(self._number)
        self._request = request
        self._processors = processors
        self._stopping_criteria = stopping_criteria
        self._trace = trace
        self._log_rounds = log_rounds
        self._on_prefill = on_prefill
        self._history: list[int] = []
        self.keeps_rows = request.wants_rows or stopping_criteria is not None or bool(llm._logits_all)
        """Whether the batch must keep the rows of a round."""
        self.records: list[Record] = []
        """How each token came, with `trace`."""
        self.rounds: list[Round] = []
        """What each round did, with `log_rounds`."""

    def begin(
        self, history: list[int], sampler: Any, gate: Gate, windows: Sequence[Window], *, resumable: bool
    ) -> None:
        """Begins with a history, a part of which the memory may hold. `windows`: as of `Gate.windows`; `resumable`: the
        caller may send tokens."""
        llm = self._llm
        n_reusable: int = llm.longest_token_prefix(llm._input_ids.tolist(), history)
        with interrupts_deferred():
            self._text.begin(
                history, gate.nodes(), [window.config() for window in windows], sampler=sampler,
                take_failure=self._processors and self._processors.take_failure, n_room=self._request.max_tokens,
                n_evaluated=min(n_reusable, len(history) - 1),  # the last one gives the first row
                trace=self._trace, keep_rows=self.keeps_rows, resumable=resumable, all_rows=self._wants_prompt_rows,
            )  # fmt: skip
            self._hold(history)
        if llm.verbose and llm.n_tokens:
            n_left = len(history) - llm.n_tokens
            print(f"FlyLlama: {llm.n_tokens} prompt tokens reused, {n_left} to evaluate", file=sys.stderr)

    @property
    def _wants_prompt_rows(self) -> bool:
        return self._request.prompt_logprobs is not None or bool(self._llm._logits_all)

    def _hold(self, history: list[int]) -> None:
        """Records what the text begins with."""
        self._history = history
        self._llm.input_ids[: len(history)] = history
        self._llm.n_tokens = self._text.n_evaluated  # of a recurrent state it may be less than could be reused

    def run(self) -> Generator[int, Sequence[int] | None, None]:
        """Yields tokens, without end, until a stopping criterion says so; what is sent is appended to the history."""
        while True:
            self._prefill()
            self._decoder.warn_if_plain(stacklevel=3)
            sent = yield from self._run_rounds()
            if sent is None:
                return
            with self._step, interrupts_deferred():
                self._text.resume(self._llm.n_tokens + 1, sent)
                self._hold(self._text.history().tolist())

    # ---- The prompt --------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Evaluates the prompt, short of what the first round takes along; one native call for each batch, so that an
        interrupt is heard between them."""
        llm = self._llm
        position, n_left = llm.n_tokens, 1
        n_evaluated = position
        while n_left:
            with self._step:
                n_left = self._text.prefill()
                if self._wants_prompt_rows:
                    position = self._collect_prompt_rows(position)
                llm.n_tokens = self._text.n_evaluated
            if self._on_prefill is not None and llm.n_tokens > n_evaluated:
                self._on_prefill(llm.n_tokens - n_evaluated, len(self._history) - n_evaluated)

    def _collect_prompt_rows(self, position: int) -> int:
        while (row := self._text.prompt_row(position, self._llm.n_vocab())) is not None:
            if self._llm._logits_all:
                self._llm.scores[position] = row
            if self._request.prompt_logprobs is not None:
                self._request.prompt_logprobs.add(row, self._history[position + 1])
            position += 1
        return position

    # ---- Rounds ------------------------------------------------------------------------------------------------------

    def _run_rounds(self) -> Generator[int, Sequence[int] | None, list[int] | None]:
        """Runs rounds and yields what they commit, until the caller sends tokens (returned) or wants no more (None)."""
        llm, text, n_vocab = self._llm, self._text, self._llm.n_vocab()
        before = text.accepted() if self._log_rounds else (0, 0, 0)
        while True:
            with self._step:
                begun = time.perf_counter()
                if self._processors:
                    with interrupts_deferred():
                        n_committed = text.round()
                else:
                    n_committed = text.round()
                started = time.perf_counter()
                committed = text.tokens()
                records = [Record.of(text.record(i)) for i in range(n_committed)] if self._trace else []
                rows = [text.record_row(i, n_vocab) for i in range(n_committed)] if self.keeps_rows else []
                if self._log_rounds:
                    now = text.accepted()
                    drafted, matched, loose = (b - a for a, b in zip(before, now))
                    self.rounds.append(Round(n_committed, drafted, matched, loose, started - begun))
                    before = now
                self._decoder.python_seconds += time.perf_counter() - started
                # A view: numpy takes several times as long for one item, and every token passes here.
                input_ids = memoryview(llm.input_ids)  # type: ignore[arg-type]
            for i, (position, token) in enumerate(committed):
                row = rows[i] if rows else None
                with self._step:
                    if position < len(input_ids):  # the last one of a full context has no place
                        input_ids[position] = token
                    llm.n_tokens = position
                    if row is not None:
                        self._keep_row(position - 1, row, token)
                if self._stopping_criteria is not None and self._stopping_criteria(llm.input_ids[:position], row):
                    return None
                if records:
                    self.records.append(records[i])
                sent = yield token
                if llm.n_tokens != position:
                    self._access.require_current(self._number)
                    raise BusyError(
                        "this FlyLlama's state was changed (reset, eval, load_state, ...) while a generation was "
                        "running; exhaust or close the generation first."
                    )
                if sent is not None and len(sent):
                    return list(sent)

    def _keep_row(self, position: int, row: npt.NDArray[np.float32], token: int) -> None:
        if self._llm._logits_all:
            self._llm.scores[position] = row
        if self._request.logprobs is not None:
            self._request.logprobs.add(row, token)
        if self._request.keep_all_rows:
            self._llm._rows.add(position, row)
        else:
            self._llm._rows.replace(position, row)
