"""`View`: what one request of a `FlyBatch` sees of the model: a `FlyLlama` of its own.

It shares model, context, tokenizer and chat formats with the others. Its text runs in a batch that another thread
steps, so that the completions of `FlyLlama` and the chat formats of the base class serve many requests at once, each in
its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_cpp.llama import LlamaState

from pyfly_cpp._native import Counters
from pyfly_cpp.batch.shared_llama import SharedLlama
from pyfly_cpp.batch.stepped_text import Text
from pyfly_cpp.batch.stepper import Stepper
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.access import Access
from pyfly_cpp.engine.decoder import Decoder
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.llama.fly_llama import FlyLlama


class ViewDecoder:
    """The `Decoder` of a view: one text after the other, in the batch of the decoder it is made of."""

    def __init__(
        self, decoder: Decoder, stepper: Stepper, ends_text: Callable[[int], bool], on_text: Callable[[Text], None]
    ) -> None:
        """`ends_text`: as of `Text`. `on_text`: is given every text before it begins."""
        self._decoder = decoder
        self._stepper = stepper
        self._ends_text = ends_text
        self._on_text = on_text
        self._text: Text | None = None
        self._ended = Counters()
        self.python_seconds = 0.0
        """Time that a generation's own Python took."""

    def new_text(self, draft_lengths: Sequence[int]) -> Text:
        """The next text, which drafts at most so many tokens with each drafter."""
        if self._text is not None:
            self._ended = self._ended + self._text.counters
        self._text = Text(self._stepper, draft_lengths, self._ends_text)
        self._on_text(self._text)
        return self._text

    @property
    def running(self) -> Text | None:
        """The text if it has begun and not ended."""
        return self._text if self._text is not None and self._text.has_text else None

    def warn_if_plain(self, stacklevel: int) -> None:
        """As of `Decoder`."""
        self._decoder.warn_if_plain(stacklevel + 1)

    def stats(self, _: bool) -> Stats:
        """What was counted of the texts of this view."""
        counters = self._ended if self._text is None else self._ended + self._text.counters
        return self._decoder.describe(counters, self.python_seconds)


class View(FlyLlama):
    """A `FlyLlama` for one request; used by one thread."""

    def __init__(self, host: SharedLlama, stepper: Stepper, on_text: Callable[[Text], None], seed: int) -> None:
        """
        Args:
            host: What was loaded; must outlive the view.
            stepper: Steps the batch of the host.
            on_text: Is given every text before it begins.
            seed: Of the request, or of the chain of seeds that it is the next of.
        """
        self.__dict__.update(host.__dict__)
        self._access = Access()
        self._decoder = ViewDecoder(  # type: ignore[assignment]
            host._decoder, stepper, host.vocabulary.ends_text, on_text
        )
        self._n_ctx = host.n_ctx_of_text
        self._seed = seed
        self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        self.n_tokens = 0
        self.records, self.rounds = [], []
        self.verbose = False

    def configure(
        self,
        decoding: Decoding,
        trace: bool | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> View:
        """How the request decodes, and what else it wants otherwise than the host; None: as the host. Returns itself;
        raises ValueError."""
        self.decoding = decoding
        if trace is not None:
            self.trace = trace
        if on_prefill is not None:
            self.on_prefill = on_prefill
        return self

    def _place(self) -> Text:
        """As of `FlyLlama`; whether drafting is governed is the batch's, not a text's."""
        decoder: Any = self._decoder
        text: Text = decoder.new_text([k for _, k in self._drafting()])
        return text

    def n_ctx(self) -> int:
        """Most tokens of a text."""
        return self._n_ctx

    def close(self) -> None:
        """Ends the text, if one runs. What was loaded is the host's."""
        self._supersede()

    # ---- What needs a context of its own -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Refused: it would clear the memory of all texts."""
        raise _needs_context("reset")

    def eval(self, tokens: Sequence[int]) -> None:
        """Refused."""
        raise _needs_context("eval (images and sound need it, too)")

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise _needs_context("embed")

    def save_state(self) -> LlamaState:
        """Refused."""
        raise _needs_context("save_state")

    def load_state(self, state: LlamaState) -> None:
        """Refused."""
        raise _needs_context("load_state")


def _needs_context(what: str) -> ValueError:
    return ValueError(f"the texts of a FlyBatch share one context, so there is no {what}; use a FlyLlama.")
