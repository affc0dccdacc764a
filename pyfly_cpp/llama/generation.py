"""`Generation`: the loop around the steps of a FlyLlama, from a prompt to the last token that somebody wants.

At every `yield`, `n_tokens`, `input_ids` and the KV cache are what the base class promises: the first `n_tokens` tokens
are evaluated, the yielded token is the next one. What the batch holds beyond that is invisible, and is gone as soon as
somebody else uses the context. With drafters the context's last row is not that of the last token; `sample` refuses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp.engine.drawing import draw
from pyfly_cpp.engine.request import Committed, Request
from pyfly_cpp.errors import BusyError, ContextFullError
from pyfly_cpp.machine.interrupts import interrupts_deferred


class Generation:
    """One generation of a FlyLlama. It begins when `run` is first asked for something, and runs as long as it is the
    current one."""

    def __init__(
        self, llm: Any, request: Request, *, reset: bool = True, next_seed: Callable[[int], int] | None = None
    ) -> None:
        """
        Args:
            llm: The FlyLlama; how it decodes is asked when the generation begins.
            request: What is wanted.
            reset: Whether the prompt is all; otherwise it goes behind what the context holds.
            next_seed: The seed to set when it begins, from the one that is set then; None: it stays.
        """
        self._llm = llm
        self.request = request
        self._reset = reset
        self._next_seed = next_seed
        self._access = llm._access
        self._number = -1

    def run(self) -> Generator[Any, Sequence[int] | None, None]:
        """Yields the tokens of a request without an output, until a stopping criterion ends it; what is sent is
        appended to the history. Of a request with an output it yields the pieces that have text, and the last one.

        Raises:
            ValueError: the prompt is empty.
            ContextFullError: the prompt does not fit in the context, or the next token; an output ends there.
            BusyError: another thread or another generation uses the object.
        """
        llm, request, output = self._llm, self.request, self.request.output
        try:
            with self._access.exclusive():
                first = self._begin()
            llm.loaded.warn_of_gate()
            while output is None or output.cause is None:
                try:
                    committed, first = first or self._advance(), []
                except ContextFullError as failure:
                    yield request.last_piece(failure)
                    return
                for one in committed:
                    started = time.perf_counter()
                    self._put(one)
                    sent: Sequence[int] | None = None
                    if output is not None:
                        piece = request.add(one)
                        llm.loaded.decoder.python_seconds += time.perf_counter() - started
                        if piece.text or piece.finish:
                            yield piece
                        if piece.finish:
                            break
                    elif not request.take(one):
                        return
                    else:
                        sent = yield one.token
                    if llm.n_tokens != one.position:
                        self._access.require_current(self._number)
                        raise BusyError(
                            "this FlyLlama's state was changed (reset, eval, load_state, ...) while a generation was "
                            "running; exhaust or close the generation first."
                        )
                    if sent is not None and len(sent):
                        with self._step, interrupts_deferred():
                            request.resume(one.position + 1, sent)
                            if request.is_in_slot:
                                self._hold()
                        break
        finally:
            self._access.last_step(self._number, llm._supersede)

    def _begin(self) -> list[Committed]:
        """Begins in the slot; or, if the first token is chosen by the row that is there, that token."""
        llm, request = self._llm, self.request
        if not self._reset:
            request.history[:0] = llm._input_ids.tolist()
        request.require_fitting(llm._n_ctx)
        llm._supersede()
        llm._follow_adapters()
        self._number = self._access.generation
        self._step = self._access.step(self._number)
        self._n_vocab: int = llm.n_vocab()
        request.trace, request.follows_answers = llm.trace, True
        llm.prepare()
        if self._next_seed is not None:
            llm.set_seed(self._next_seed(llm._seed))
        self._sampler = llm.new_sampler(request)
        n_reusable: int = llm.longest_token_prefix(llm._input_ids.tolist(), request.history)
        with interrupts_deferred():
            first = self._choose_by_row() if n_reusable == llm.n_tokens == len(request.history) else []
            if not first:
                self._begin_in_slot(n_reusable)
        llm.records = request.records
        if llm.verbose and llm.n_tokens:
            n_left = len(request.history) - llm.n_tokens
            print(f"FlyLlama: {llm.n_tokens} prompt tokens reused, {n_left} to evaluate", file=sys.stderr)
        return first

    def _choose_by_row(self) -> list[Committed]:
        """The first token, if a recurrent state holds all of the prompt, and its row is there: the state cannot go back
        by a token, and may hold more than the tokens tell (an image). Such a token has no record and no part in the
        counters."""
        llm, request = self._llm, self.request
        if llm._requires_eval or request.reads_prompt or not (llm._is_recurrent or llm._is_hybrid):
            return []
        n, context = len(request.history), llm._ctx
        is_last = llama_cpp.llama_memory_seq_pos_max(context.memory, 0) == n - 1
        pointer = context.get_logits_ith(-1) if is_last and n < llm._n_ctx else None
        if not pointer:
            return []
        row = np.ctypeslib.as_array(pointer, (self._n_vocab,)).copy()
        token = draw(self._sampler.sampler, row)
        request.raise_failure()
        return [] if token is None else [request.begin_with(token, row)]

    def _begin_in_slot(self, n_held: int) -> None:
        """`n_held`: tokens of the request that the context holds."""
        llm, request = self._llm, self.request
        # The last token gives the first row.
        n_evaluated = min(n_held, len(request.history) - 1)
        request.begin(llm.loaded.decoder.slot, llm.decoding, self._sampler, n_evaluated=n_evaluated)
        llm._requires_eval = True
        llm.has_row = not llm.loaded.decoder.drafters
        self._hold()

    def _advance(self) -> list[Committed]:
        """The tokens of the next step."""
        llm, request = self._llm, self.request
        with self._step:
            if not request.is_in_slot:
                with interrupts_deferred():
                    self._begin_in_slot(llm.n_tokens)
            begun = time.perf_counter()
            if not request.calls_python:
                progress = llm.loaded.decoder.batch.step_alone()
            else:
                with interrupts_deferred():
                    progress = llm.loaded.decoder.batch.step_alone()
            committed = self._read(progress, begun)
        if not progress.is_step:
            request.tell_prefill(llm.on_prefill)
        elif len(request.arrivals) <= 2:  # the first step: one token may have been chosen before it
            llm.loaded.decoder.warn_if_plain(stacklevel=3)
        return committed

    def _hold(self) -> None:
        """Records what the request begins with."""
        history = self.request.history
        self._llm.input_ids[: len(history)] = history
        self._llm.n_tokens = self.request.slot.n_evaluated  # of a recurrent state it may be less than could be reused

    def _read(self, progress: Any, begun: float) -> list[Committed]:
        """What a step that began then has committed."""
        llm, request, started = self._llm, self.request, time.perf_counter()
        if progress.is_step:
            committed = request.read_step(self._n_vocab, started - begun)
            llm.loaded.decoder.python_seconds += time.perf_counter() - started
            return committed
        for position, row in request.read_prompt(self._n_vocab):
            if llm._logits_all:
                llm.scores[position] = row
        llm.n_tokens = request.slot.n_evaluated
        return []

    def _put(self, one: Committed) -> None:
        """Makes a committed token the next one of the base class's sequence."""
        llm = self._llm
        with self._step:
            if one.position < len(llm.input_ids):  # the last one of a full context has no place
                llm.input_ids[one.position] = one.token
            llm.n_tokens = one.position
            if one.row is not None and llm._logits_all:
                llm.scores[one.position - 1] = one.row
