"""`Generation`: the loop around the rounds, from a prompt to the last token that somebody wants.

At every `yield`, `n_tokens`, `input_ids` and the KV cache are what the base class promises: the first `n_tokens` tokens
are evaluated, the yielded token is the next one. What the batch holds beyond that is invisible, and is gone as soon as
somebody else uses the context.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList

from pyfly_cpp._native import RawRecord
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Logprobs, Row, logprobs_of
from pyfly_cpp.engine.processors import Processors
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.stats import Record, Round
from pyfly_cpp.errors import BusyError, ContextFullError
from pyfly_cpp.machine.interrupts import interrupts_deferred


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
    """One generation of a FlyLlama. It begins when `run` is first asked for a token, and runs as long as it is the
    current one."""

    def __init__(
        self,
        llm: Any,
        tokens: Sequence[int],
        request: Request,
        *,
        reset: bool,
        logits_processor: LogitsProcessorList | None,
        stopping_criteria: StoppingCriteriaList | None,
        sampling: Mapping[str, Any],
    ) -> None:
        """
        Args:
            llm: The FlyLlama; how it decodes is asked when the generation begins.
            tokens: The prompt.
            request: What is wanted.
            reset: Whether the prompt is all; otherwise it goes behind what the context holds.
            logits_processor, stopping_criteria: As of `generate`.
            sampling: Its other arguments.
        """
        self._llm = llm
        self._tokens = tokens
        self._request = request
        self._reset = reset
        self._logits_processor = logits_processor
        self._stopping_criteria = stopping_criteria
        self._sampling = sampling
        self._access = llm._access
        self._decoder = llm._decoder
        self._processors: Processors | None = None
        self._text: Text
        self._number = -1
        self._history: list[int] = []
        self._trace = self._log_rounds = False
        self._records: list[Record] = []
        self._rounds: list[Round] = []
        self._accepted = (0, 0, 0)
        self._keeps_rows = request.keeps_rows or stopping_criteria is not None or bool(llm._logits_all)
        self._wants_prompt_rows = request.n_prompt_logprobs is not None or bool(llm._logits_all)
        self.row: Row | None = None
        """The logits [n_vocab] that the newest token was chosen by, where rows are kept."""
        self.record: Record | None = None
        """How the newest token came, with `trace`."""
        self.prompt_logprobs: list[Logprobs] = []
        """Of the prompt's tokens behind `prompt_from`, where they are wanted."""

    def run(self) -> Generator[int, Sequence[int] | None, None]:
        """Yields tokens, without end, until a stopping criterion says so; what is sent is appended to the history.

        Raises:
            ValueError: the prompt is empty.
            ContextFullError: the prompt, or the next token, does not fit in the context.
            BusyError: another thread or another generation uses the object.
        """
        llm = self._llm
        try:
            with self._access.exclusive():
                self._begin()
            llm._warn_of_gate()
            while True:
                self._prefill()
                self._decoder.warn_if_plain(stacklevel=2)
                sent: Sequence[int] | None = None
                while sent is None:
                    for position, token, row, record in self._round():
                        self._take(position, token, row)
                        if self._stopping_criteria is not None and self._stopping_criteria(
                            llm.input_ids[:position], row
                        ):
                            return
                        if record is not None:
                            self.record = record
                            self._records.append(record)
                        sent = yield token
                        if llm.n_tokens != position:
                            self._access.require_current(self._number)
                            raise BusyError(
                                "this FlyLlama's state was changed (reset, eval, load_state, ...) while a generation "
                                "was running; exhaust or close the generation first."
                            )
                        if sent is not None and len(sent):
                            break
                        sent = None
                with self._step, interrupts_deferred():
                    self._text.resume(llm.n_tokens + 1, list(sent))
                    self._hold(self._text.history().tolist())
        finally:
            with self._access.last_step(self._number) as is_mine:
                if is_mine:
                    llm._supersede()

    # ---- The prompt --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        llm, request = self._llm, self._request
        decoding: Decoding = llm.decoding
        history = self._all_tokens()
        llm._supersede()
        self._number = self._access.generation
        self._step = self._access.step(self._number)
        self._trace, self._log_rounds = llm.trace, llm.log_rounds
        self._text = text = llm._place()
        if self._logits_processor:
            self._processors = Processors(text, self._logits_processor)
        sampler = llm._init_sampler(
            logits_processor=self._processors and LogitsProcessorList([self._processors]), **self._sampling
        )
        n_reusable: int = llm.longest_token_prefix(llm._input_ids.tolist(), history)
        with interrupts_deferred():
            text.begin(
                history, decoding.gate.nodes(), [window.config() for window in decoding.gate.windows(decoding.window)],
                sampler=sampler,
                take_failure=self._processors and self._processors.take_failure, n_room=request.max_tokens,
                n_evaluated=min(n_reusable, len(history) - 1),  # the last one gives the first row
                trace=self._trace, keep_rows=self._keeps_rows, resumable=request.resumable,
                all_rows=self._wants_prompt_rows,
            )  # fmt: skip
            self._hold(history)
        if self._log_rounds:
            self._accepted = text.accepted()
        self._records = llm.records = []
        self._rounds = llm.rounds = []
        llm._requires_eval = True
        if llm.verbose and llm.n_tokens:
            n_left = len(history) - llm.n_tokens
            print(f"FlyLlama: {llm.n_tokens} prompt tokens reused, {n_left} to evaluate", file=sys.stderr)

    def _all_tokens(self) -> list[int]:
        """What the generation begins with. Raises ValueError: nothing; ContextFullError: too much."""
        llm = self._llm
        history = list(self._tokens) if self._reset else [*llm._input_ids.tolist(), *self._tokens]
        if not history:
            raise ValueError("the prompt is empty; give at least one token.")
        if len(history) > llm._n_ctx:
            raise ContextFullError(
                f"the prompt has {len(history)} tokens and the context holds {llm._n_ctx}; shorten the prompt or "
                "raise n_ctx."
            )
        if self._request.n_prompt_logprobs is not None:
            llm.n_tokens = 0  # the prompt's rows are wanted: nothing of it may come from the cache
        return history

    def _hold(self, history: list[int]) -> None:
        """Records what the text begins with."""
        self._history = history
        self._llm.input_ids[: len(history)] = history
        self._llm.n_tokens = self._text.n_evaluated  # of a recurrent state it may be less than could be reused

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
            if llm.on_prefill is not None and llm.n_tokens > n_evaluated:
                llm.on_prefill(llm.n_tokens - n_evaluated, len(self._history) - n_evaluated)

    def _collect_prompt_rows(self, position: int) -> int:
        n_top, first = self._request.n_prompt_logprobs, self._request.prompt_from
        while (row := self._text.prompt_row(position, self._llm.n_vocab())) is not None:
            if self._llm._logits_all:
                self._llm.scores[position] = row
            if n_top is not None and position >= first:
                self.prompt_logprobs.append(logprobs_of(row, self._history[position + 1], n_top))
            position += 1
        return position

    # ---- Rounds ------------------------------------------------------------------------------------------------------

    def _round(self) -> list[tuple[int, int, Row | None, Record | None]]:
        """Runs a round: (position, token, row, record) of what it committed."""
        llm, text = self._llm, self._text
        with self._step:
            begun = time.perf_counter()
            if self._processors:
                with interrupts_deferred():
                    n_committed = text.round()
            else:
                n_committed = text.round()
            started = time.perf_counter()
            places, n_vocab = range(n_committed), llm.n_vocab()
            committed = [
                (
                    position,
                    token,
                    text.record_row(i, n_vocab) if self._keeps_rows else None,
                    Record.of(text.record(i)) if self._trace else None,
                )
                for i, (position, token) in zip(places, text.tokens())
            ]
            if self._log_rounds:
                now = text.accepted()
                drafted, matched, loose = (b - a for a, b in zip(self._accepted, now))
                self._rounds.append(Round(n_committed, drafted, matched, loose, started - begun))
                self._accepted = now
            self._decoder.python_seconds += time.perf_counter() - started
        return committed

    def _take(self, position: int, token: int, row: Row | None) -> None:
        """Makes a committed token the next one of the sequence."""
        llm = self._llm
        with self._step:
            if position < len(llm.input_ids):  # the last one of a full context has no place
                llm.input_ids[position] = token
            llm.n_tokens = position
            if row is not None and llm._logits_all:
                llm.scores[position - 1] = row
        self.row = row
