"""What a completion asks of the generation that it starts."""

from __future__ import annotations

import math
import threading
from typing import Any

from pyfly_cpp.logprobs import LogprobCollector, completion_logprobs

_UNLIMITED = 2**31 - 1


class Request:
    """How long a generation may become, and which rows are wanted of it."""

    def __init__(
        self, max_tokens: float | None = None, logprobs: int | None = None, echo: bool = False, stream: bool = False
    ) -> None:
        """Arguments as of a completion; `max_tokens` is any number that the base class takes: 0, None and infinity are
        no limit."""
        if max_tokens is None or not 0 < max_tokens < _UNLIMITED:
            max_tokens = _UNLIMITED
        self.max_tokens: int = math.ceil(max_tokens)
        self.logprobs: LogprobCollector | None = None
        self.prompt_logprobs: LogprobCollector | None = None
        self.keep_all_rows = False
        if logprobs is not None and stream:
            self.keep_all_rows = True  # the base class reads them
        elif logprobs is not None:
            self.logprobs = LogprobCollector(logprobs)
            self.prompt_logprobs = LogprobCollector(logprobs) if echo else None

    @property
    def wants_rows(self) -> bool:
        """Whether the rows behind the generated tokens are needed."""
        return self.keep_all_rows or self.logprobs is not None

    def response_logprobs(self, llm: Any, prompt: str | list[int], echo: bool, response: Any) -> dict[str, Any]:
        """The `logprobs` field of a whole response of `llm`, from what was collected."""
        assert self.logprobs is not None
        n_completion = response["usage"]["completion_tokens"]
        n_prompt = response["usage"]["prompt_tokens"]
        tokens = self.logprobs.tokens[:n_completion]
        entries: list[Any] = list(self.logprobs.entries[:n_completion])
        if self.prompt_logprobs is not None:
            tokens = [*llm.input_ids[:n_prompt].tolist(), *tokens]
            entries = [None, *self.prompt_logprobs.entries[: n_prompt - 1], *entries]
        bos = llm.token_bos()
        if echo and tokens and tokens[0] == bos:
            tokens, entries = tokens[1:], [None, *entries[2:]]
        return completion_logprobs(llm.detokenize, tokens, entries, 0 if echo else len(prompt), bos)


class HandOver(threading.local):
    """The way of a request through the base class, to the generation that this thread starts next."""

    request: Request | None = None

    def take(self) -> Request | None:
        """The request, for one generation alone."""
        request, self.request = self.request, None
        return request
