"""The text of an order while it is written, in a thread of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from llama_cpp import LlamaGrammar
from llama_cpp.llama import LogitsProcessorList

from pyfly_cpp.batch.views import View
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.engine.processors import bias_processor
from pyfly_cpp.engine.request import Request
from pyfly_cpp.errors import ContextFullError
from pyfly_cpp.serve.orders import Order


def write(llm: View, order: Order, is_late: Callable[[], bool]) -> Iterator[Piece]:
    """Writes the text of an order.

    Args:
        llm: The request's own, configured.
        is_late: Asked after each token: whether the text ends with it, because its time is over.

    Yields:
        Pieces that have text, and the last one; the first has the log-probabilities of the prompt, if they are wanted,
        the last one what was counted.

    Raises:
        ContextFullError: the prompt does not fit. A text that fills the context ends with `"length"`.
        ValueError: the rule or the sampling cannot be.
    """
    llm._warn_of_gate = lambda: None  # type: ignore[method-assign]  # strangers' settings are no news to stderr
    n_of_prompt = order.n_logprobs if order.echo else None
    request = Request(max(1, order.max_tokens), order.n_logprobs is not None, n_of_prompt)
    generation = llm.start(order.prompt, request, **_sampling(order))
    output = llm.new_output(order.prompt, order.stop, order.max_tokens, order.n_logprobs)
    is_first = True
    with contextlib.closing(generation.run()) as tokens:
        while output.cause is None:
            try:
                token = next(tokens)
                piece = output.end("length") if order.max_tokens == 0 else \
                    output.add(token, generation.row, generation.record)  # fmt: skip
            except ContextFullError:
                if output.n_tokens == 0:
                    raise
                piece = output.end("context")
            if output.cause is None and is_late():
                rest = output.end("length")
                piece = rest._replace(text=piece.text + rest.text, tokens=piece.tokens + rest.tokens)
            if is_first and n_of_prompt is not None:
                piece = piece._replace(prompt=tuple(generation.prompt_logprobs))
            if output.cause is not None:
                piece = piece._replace(stats=llm.stats)
            if piece.text or output.cause is not None:
                is_first = False
                yield piece


def _sampling(order: Order) -> dict[str, Any]:
    sampling = dict(order.sampling)
    if order.logit_bias:
        sampling["logits_processor"] = LogitsProcessorList([bias_processor(order.logit_bias)])
    if order.grammar is not None:
        sampling["grammar"] = LlamaGrammar.from_string(order.grammar.text, verbose=False)
    return sampling
