"""`CompletingLlama`: the base class's completions, with log-probabilities that need no logits of all positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llama_cpp.llama import LogitsProcessorList
from llama_cpp.llama_grammar import LlamaGrammar

from pyfly_cpp.guarded_llama import GuardedLlama
from pyfly_cpp.processors import ExtendableProcessors
from pyfly_cpp.request import HandOver, Request
from pyfly_cpp.schemas import with_strict_strings


class CompletingLlama(GuardedLlama):
    """A `GuardedLlama` whose subclass has a `generate` that takes what is handed over."""

    _handed_over: HandOver

    def _create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: float | None = 16,
        *,
        logprobs: int | None = None,
        echo: bool = False,
        stream: bool = False,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """The base class's completion; this adds the limit that drafting should respect, log-probabilities, and strict
        strings where a chat format made the grammar of a schema."""
        request = Request(max_tokens, logprobs, echo, stream)
        collects = request.logprobs is not None
        if logits_processor is not None:
            # A copy that can be extended: the base class appends its logit-bias processor to the caller's own list.
            logits_processor = ExtendableProcessors(logits_processor)
        if grammar is not None:
            grammar = with_strict_strings(grammar)
        self._handed_over.request = request
        try:
            for response in super()._create_completion(
                prompt, suffix, max_tokens,
                logprobs=None if collects else logprobs, echo=echo, stream=stream, logits_processor=logits_processor,
                grammar=grammar, **kwargs,
            ):  # fmt: skip
                if collects:
                    response["choices"][0]["logprobs"] = request.response_logprobs(self, prompt, echo, response)
                yield response
        finally:
            self._handed_over.request = None
