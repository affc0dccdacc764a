"""`Request`: one request on a loaded model, from its prompt to the last piece of its answer.

Whoever steps the batch begins a request in a slot and lets it read what each step brought: the caller's own thread in a
`FlyLlama` (llama/generation.py), one thread for all requests in a `FlyBatch` (stepper.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList

from pyfly_cpp._native import ChainMask, Slot
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.output import Logprobs, Output, Piece, Row, logprobs_of
from pyfly_cpp.engine.processors import Processors
from pyfly_cpp.engine.recorded import Recorded
from pyfly_cpp.engine.request_limits import require_sampling
from pyfly_cpp.engine.stats import Record, Step
from pyfly_cpp.errors import ContextFullError

UNLIMITED = 2**31 - 1


class Committed(NamedTuple):
    """A token that came out for good."""

    position: int
    """Place in the sequence, 0 for the first prompt token."""
    token: int
    row: Row | None
    """The logits [n_vocab] that it was chosen by, if rows are kept."""
    record: Record | None
    """How it was produced, with trace."""


class Request:
    """One request: what is asked, the slot it runs in, and what came of it. Used by one thread at a time."""

    def __init__(
        self,
        prompt: Sequence[int],
        output: Output | None = None,
        *,
        n_prompt_logprobs: int | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        keeps_all_rows: bool = False,
        piece_of: Callable[[int], bytes] | None = None,
    ) -> None:
        """
        Args:
            prompt: Token ids.
            output: Makes the text of the answer and finds its end; drafts go no further than its max_tokens. None:
                tokens are wanted, without end, and some may be sent.
            n_prompt_logprobs: Most probable tokens that are wanted at each place of the prompt; None: no
                log-probabilities of it.
            logits_processor, stopping_criteria: As of `Llama.generate`; called by whoever steps the batch.
            sampling: The other arguments of `Llama.generate`.
            keeps_all_rows: Whether the rows of all tokens are wanted, prompt included.
            piece_of: The bytes of a token, for notebooks that show the records; None: they show none.

        Raises:
            ValueError: an argument of the sampling is out of range.
        """
        require_sampling(sampling)
        self.history = list(prompt)
        """The tokens of the prompt and of the answer."""
        self.output = output
        self.processors = Processors(self._before_row, logits_processor) if logits_processor else None
        self.mask: ChainMask | None = None
        """The sampler of the schema that the answer follows."""
        self.sampling = sampling
        self.owner = 0
        """Whose it is: nothing that was evaluated for another owner is used, nor their answers by prompt lookup."""
        self.follows_answers = False
        """Whether prompt lookup may draft from its owner's earlier answers although its gate lets drafts change the
        answer, which then depends on these."""
        self.trace = False
        """Whether each token has a record."""
        self.records: list[Record] = Recorded(piece_of)
        """How each token of the answer was produced, with trace."""
        self.log_steps = False
        self.steps: list[Step] = []
        """The counts of each step, with log_steps."""
        self.on_piece: Callable[[Piece], None] | None = None
        """Called with each piece by whoever steps the batch, while the model is loaded."""
        self.begun = 0.0
        """When it began in its slot: `time.perf_counter`."""
        self.arrivals: list[float] = []
        """When the tokens of each step came, which come together: `time.perf_counter`."""
        self.n_arrived: list[int] = []
        """Tokens of the answer that came then, an end-of-text token included."""
        self.prompt_logprobs: list[Logprobs] = []
        """Log-probabilities of the prompt's tokens after the first, if requested."""
        self._n_prompt_logprobs = n_prompt_logprobs
        self._stopping_criteria = stopping_criteria
        self._wants_prompt_rows = keeps_all_rows or n_prompt_logprobs is not None
        self._keeps_rows = (
            keeps_all_rows or stopping_criteria is not None or (output is not None and output.n_logprobs is not None)
        )
        self._accepted = (0, 0, 0)
        self._n_prompt = len(self.history)
        self._begun_at = self._position = 0
        self._has_given = False
        self.is_in_slot = False
        """Whether it has begun in a slot."""
        self.slot: Slot
        """Where it runs, from `begin` on."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of the answer, an end-of-text token included."""
        return self.history[self._n_prompt :]

    @property
    def reads_prompt(self) -> bool:
        """Whether all of the prompt is evaluated, whatever the slot's memory holds of it."""
        return self._n_prompt_logprobs is not None

    def _before_row(self) -> npt.NDArray[np.int32]:
        """The tokens before the row that is being sampled."""
        return self.slot.history() if self.is_in_slot else np.array(self.history, dtype=np.int32)

    def require_fitting(self, n_ctx: int) -> None:
        """Raises ValueError if the prompt is empty, ContextFullError if it has more than n_ctx tokens."""
        if not self.history:
            raise ValueError("the prompt is empty; give at least one token.")
        if len(self.history) > n_ctx:
            raise ContextFullError(
                f"the prompt has {len(self.history)} tokens and the context holds {n_ctx}; shorten the prompt or "
                "raise {n_ctx}."
            )

    # ---- Whoever steps the batch -------------------------------------------------------------------------------------

    def begin(
        self,
        slot: Slot,
        decoding: Decoding,
        sampler: Any,
        *,
        n_evaluated: int | None = None,
        draft_max: Sequence[int] | None = None,
    ) -> None:
        """Begins in a slot: the one place where a `Decoding` becomes what the core is asked for.

        Args:
            decoding: How it decodes, except for drafter and adaptive, which are the batch's.
            sampler: A llama_cpp `LlamaSampler`.
            n_evaluated: Tokens that the slot's memory holds; None: as many as the batch knows of.
            draft_max: Most tokens of a step, for each of the batch's drafters; None: those of the batch.

        Raises:
            ValueError: the prompt has a token that is none.
        """
        gate, output = decoding.gate, self.output
        n_room = (
            UNLIMITED if output is None or output.max_tokens is None else max(1, output.max_tokens - output.n_tokens)
        )
        slot.begin(
            self.history, gate.nodes(), (decoding.window or gate.window).config(), sampler=sampler,
            take_failure=self.take_failure if self.calls_python else None, n_room=n_room,
            n_evaluated=0 if self.reads_prompt else n_evaluated, draft_max=draft_max, trace=self.trace,
            keep_rows=self._keeps_rows, resumable=output is None, all_rows=self._wants_prompt_rows, owner=self.owner,
            follows_answers=self.follows_answers,
        )  # fmt: skip
        self.slot, self.is_in_slot, self.begun = slot, True, time.perf_counter()
        if not self.arrivals:
            self._n_prompt = len(self.history)
        self._begun_at = self._position = slot.n_evaluated
        if self.log_steps:
            self._accepted = slot.accepted()

    @property
    def calls_python(self) -> bool:
        """Whether its sampler calls functions of Python."""
        return self.processors is not None or self.mask is not None

    def take_failure(self) -> BaseException | None:
        """What a function that its sampler calls has raised, once."""
        failures = [one.take_failure() for one in (self.processors, self.mask) if one is not None]
        return next(filter(None, failures), None)

    def raise_failure(self) -> None:
        """Raises what a function that its sampler calls has raised."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def begin_with(self, token: int, row: Row) -> Committed:
        """The first token of the answer, if it was chosen by a row before `begin`."""
        self._n_prompt = len(self.history)
        self.arrivals.append(time.perf_counter())
        self.n_arrived.append(0)
        return Committed(len(self.history), token, row if self._keeps_rows else None, None)

    def resume(self, n_keep: int, tokens: Sequence[int]) -> None:
        """Continues behind the first n_keep tokens with the caller's. Raises ContextFullError: they do not fit in the
        slot where it runs."""
        if self.is_in_slot:
            self.slot.resume(n_keep, list(tokens))
            self._begun_at = self._position = self.slot.n_evaluated
        self.history[n_keep:] = map(int, tokens)

    def read_prompt(self, n_vocab: int) -> list[tuple[int, Row]]:
        """What an iteration without a step has evaluated: (position, row) of the tokens, if rows are wanted."""
        slot, was, rows = self.slot, self._position, list[tuple[int, Row]]()
        while self._wants_prompt_rows and (row := slot.prompt_row(was + len(rows), n_vocab)) is not None:
            rows.append((was + len(rows), row))
        if self._n_prompt_logprobs is not None:
            del self.prompt_logprobs[was:]  # it has made room for others, and begins anew
            self.prompt_logprobs += [logprobs_of(row, self.history[i + 1], self._n_prompt_logprobs) for i, row in rows]
        self._position = slot.n_evaluated
        return rows

    def tell_prefill(self, on_prefill: Callable[[int, int], None] | None) -> None:
        """Tells, after an iteration without a step, how many prompt tokens of how many are evaluated, if any are."""
        if on_prefill is not None and self._position > self._begun_at:
            on_prefill(self._position - self._begun_at, len(self.history) - self._begun_at)

    def read_step(self, n_vocab: int, seconds: float) -> list[Committed]:
        """What a step has committed. `seconds`: that it took."""
        slot, keeps_rows, trace = self.slot, self._keeps_rows, self.trace
        committed = [
            Committed(
                position,
                token,
                slot.record_row(i, n_vocab) if keeps_rows else None,
                Record.of(slot.record(i)) if trace else None,
            )
            for i, (position, token) in enumerate(slot.tokens())
        ]
        if committed:
            self.arrivals.append(time.perf_counter())
            self.n_arrived.append(0)
        if self.log_steps:
            now = slot.accepted()
            drafted, matched, loose = (b - a for a, b in zip(self._accepted, now))
            self.steps.append(Step(len(committed), drafted, matched, loose, seconds))
            self._accepted = now
        return committed

    def take(self, one: Committed) -> bool:
        """Makes a committed token the next of the answer; False if a stopping criterion declares that it is none."""
        position, token, _, record = one
        if self._stopping_criteria is not None and self._is_stopped(one):
            return False
        self.history[position:] = [token]
        self.n_arrived[-1] += 1
        if record is not None:
            self.records.append(record)
        return True

    def add(self, one: Committed) -> Piece:
        """What the answer grows by with a committed token; see `Output.add`."""
        assert self.output is not None
        piece = self.output.add(one.token, one.row, one.record) if self.take(one) else self.output.end("stop")
        if piece.finish and self._stopping_criteria is not None and self._is_stopped(one):  # as the base class asks
            piece = piece._replace(finish="stop")
        return self._told(piece)

    def _is_stopped(self, one: Committed) -> bool:
        assert self._stopping_criteria is not None
        return bool(self._stopping_criteria(np.array(self.history[: one.position], dtype=np.intc), one.row))

    def end(self, cause: str) -> Piece:
        """Ends the answer where it stands; see `Output.end`."""
        assert self.output is not None
        return self._told(self.output.end(cause))

    def last_piece(self, failure: BaseException) -> Piece:
        """The end of an answer that has filled the context. Raises any other failure, and this one of a prompt."""
        if not isinstance(failure, ContextFullError) or self.output is None or not self.output.n_tokens:
            raise failure
        return self.end("context")

    def _told(self, piece: Piece) -> Piece:
        """With the log-probabilities of the prompt in the first piece that is given out."""
        if not self._has_given and (piece.text or piece.finish):
            self._has_given = True
            if self._n_prompt_logprobs is not None:
                piece = piece._replace(prompt=tuple(self.prompt_logprobs))
        if self.on_piece is not None:
            self.on_piece(piece)
        return piece
