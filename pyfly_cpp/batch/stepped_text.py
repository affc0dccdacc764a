"""A text that another thread steps.

`Text` stands, in the thread that reads a text, where a `FlyLlama` has the slot of its batch: what it is asked for, the
stepping thread (stepper.py) does between two steps; what the steps bring comes back as reports. A text goes on while
its reader works on what it has, a few rounds ahead at most: it is held then, and the others are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pyfly_cpp._native import Counters, Progress, RawRecord, Slot

_MOST_AHEAD = 4  # reports that a text may be ahead of its reader

Row = npt.NDArray[np.float32]


class _Report(NamedTuple):
    """What a step did for a text."""

    n_left: int
    n_evaluated: int
    counters: Counters
    tokens: tuple[tuple[int, int], ...] = ()
    records: tuple[RawRecord, ...] = ()
    rows: tuple[Row | None, ...] = ()
    prompt_rows: Mapping[int, Row | None] = MappingProxyType({})


class Owner(Protocol):
    """What gives texts their slots and steps them."""

    def add(self, text: Text) -> None:
        """The text wants a slot."""

    def remove(self, text: Text) -> None:
        """It has ended, or wants its slot no more."""

    def wake(self) -> None:
        """Its reader waits for something."""


class Text:
    """A text in a batch that another thread steps; used by one thread, as a `Slot` would be."""

    def __init__(self, stepper: Owner, draft_lengths: Sequence[int], ends_text: Callable[[int], bool]) -> None:
        """
        Args:
            stepper: Where it runs.
            draft_lengths: Most tokens drafted in a round, for each of the batch's drafters.
            ends_text: Whether a token is the last that anybody wants.
        """
        self._stepper = stepper
        self._draft_lengths = draft_lengths
        self._ends_text = ends_text
        self._reports: SimpleQueue[_Report | BaseException] = SimpleQueue()
        self._interrupt: BaseException | None = None
        self._report = _Report(0, 0, Counters())
        self._next_report: _Report | None = None
        self._n_asked = 0  # reports that the reader has asked for
        self.has_text = False
        """Whether it runs or waits for a slot: from `begin` to `end`, also after an error."""
        # Of the stepping thread:
        self.slot: Slot | None = None
        self.history_to_begin: Any = None
        self._begin: Callable[[Slot], None] | None = None
        self._wants_records = self._wants_rows = self._wants_prompt_rows = False
        self._n_vocab = 0
        self._n_put = 0  # reports that the reader was given
        self._n_room = 0  # tokens that are still wanted
        self._is_held = False
        self._n_left = 0  # as the reader was told
        self._n_evaluated = 0

    # ---- The reader's side -------------------------------------------------------------------------------------------

    def begin(self, history: Any, gate: Any, window: Any, **options: Any) -> None:
        """As of `Slot`, when a slot is free. What the memory holds of the text is the batch's own knowledge, so
        `n_evaluated` is not."""
        all_rows = options["all_rows"]
        options["n_evaluated"] = 0 if all_rows else None
        self._wants_records, self._wants_rows = options["trace"], options["keep_rows"]
        self._wants_prompt_rows, self._n_room = all_rows, options["n_room"]

        def begin(slot: Slot) -> None:
            slot.begin(history, gate, window, draft_max=self._draft_lengths, **options)

        self._begin, self.history_to_begin, self.has_text = begin, history, True
        self._stepper.add(self)
        self._report = self._ask()

    def resume(self, n_keep: int, tokens: Any) -> None:
        """Never: completions send nothing."""
        raise NotImplementedError("tokens cannot be sent into a text of a FlyBatch; use a FlyLlama.")

    def prefill(self) -> int:
        """As of `Slot`: waits for something more of the prompt."""
        if self._report.n_left == 0:
            return 0
        report = self._ask()
        if report.tokens:  # the rest went with the first round
            self._next_report = report
            report = self._report._replace(n_left=0)
        self._report = report
        return report.n_left

    def round(self) -> int:
        """As of `Slot`."""
        if self._next_report is None:
            self._report = self._ask()
        else:
            self._report, self._next_report = self._next_report, None
        return len(self._report.tokens)

    def prompt_row(self, position: int, n_vocab: int) -> Row | None:
        """As of `Slot`."""
        return self._report.prompt_rows.get(position)

    def tokens(self) -> list[tuple[int, int]]:
        """As of `Slot`."""
        return list(self._report.tokens)

    def record(self, i: int) -> RawRecord:
        """As of `Slot`."""
        return self._report.records[i]

    def record_row(self, i: int, n_vocab: int) -> Row | None:
        """As of `Slot`."""
        return self._report.rows[i]

    def history(self) -> npt.NDArray[np.int32]:
        """As of `Slot`, inside a logits processor: the stepping thread is in a step then."""
        assert self.slot is not None
        return self.slot.history()

    def accepted(self) -> tuple[int, int, int]:
        """As of `Slot`."""
        return self._report.counters.accepted

    @property
    def n_evaluated(self) -> int:
        """As of `Slot`."""
        return self._report.n_evaluated

    @property
    def counters(self) -> Counters:
        """What was counted, as the reader knows it."""
        return self._report.counters

    def end(self, _: int = -1) -> None:
        """The text ends and its slot is free for the next; what it holds of the committed tokens serves that one."""
        self.has_text = False
        self._stepper.remove(self)

    def interrupt(self, failure: BaseException) -> None:
        """From any thread: whoever reads gets this, at once and from now on."""
        self._interrupt = failure
        self._reports.put(failure)

    def _ask(self) -> _Report:
        if self._interrupt is not None:
            raise self._interrupt
        self._n_asked += 1
        self._stepper.wake()
        report = self._reports.get()
        failure = self._interrupt or (report if isinstance(report, BaseException) else None)
        if failure is not None:
            raise failure
        assert isinstance(report, _Report)
        return report

    # ---- The stepping thread's side ----------------------------------------------------------------------------------

    def start(self, slot: Slot, n_vocab: int) -> None:
        """Begins in a slot; raises what `Slot.begin` does."""
        assert self._begin is not None
        slot.reset_counters()
        self._begin(slot)
        self.slot, self._n_vocab = slot, n_vocab
        self._n_left, self._n_evaluated = slot.n_left, slot.n_evaluated
        self._put(_Report(self._n_left, self._n_evaluated, slot.snapshot()))

    def choose(self) -> bool:
        """Whether it takes part in the next step: its reader waits, or is not far behind and wants more."""
        assert self.slot is not None
        n_ahead = self._n_put - self._n_asked
        is_wanted = self._interrupt is None and (n_ahead < 0 or (self._n_room > 0 and n_ahead < _MOST_AHEAD))
        if is_wanted == self._is_held:
            self.slot.hold(not is_wanted)
            self._is_held = not is_wanted
        return is_wanted

    def take(self, progress: Progress) -> bool:
        """Reports what a step did; returns whether it did anything."""
        slot = self.slot
        assert slot is not None
        was_evaluated, was_left = self._n_evaluated, self._n_left
        self._n_evaluated = n_evaluated = slot.n_evaluated
        if self._is_held or progress.is_waiting:
            return False
        has_moved = progress.n_records > 0 or n_evaluated != was_evaluated
        if progress.n_records > 0:
            self._n_left = 0
            tokens = tuple(slot.tokens())
            ends = any(self._ends_text(token) for _, token in tokens)
            self._n_room = 0 if ends else self._n_room - len(tokens)
            places = range(len(tokens))
            records = tuple(slot.record(i) for i in places) if self._wants_records else ()
            rows = tuple(slot.record_row(i, self._n_vocab) for i in places) if self._wants_rows else ()
            self._put(_Report(0, n_evaluated, slot.snapshot(), tokens, records, rows))
        elif was_left > 0:
            self._n_left = slot.n_left
            has_moved = has_moved or self._n_left != was_left
            if has_moved:
                wanted = range(was_evaluated, n_evaluated) if self._wants_prompt_rows else ()
                kept = {position: slot.prompt_row(position, self._n_vocab) for position in wanted}
                self._put(_Report(self._n_left, n_evaluated, slot.snapshot(), prompt_rows=kept))
        return has_moved

    def fail(self, failure: BaseException) -> None:
        """Whoever reads gets this behind what there is to read."""
        self._reports.put(failure)

    def _put(self, report: _Report) -> None:
        self._n_put += 1
        self._reports.put(report)
