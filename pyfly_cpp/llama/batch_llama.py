"""`BatchLlama`: what loads the model of a `FlyBatch`, with a context that several requests share, and formats chats."""

from __future__ import annotations

import os
from typing import Any

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp.errors import ArgumentError, counted
from pyfly_cpp.llama.drafting_llama import DraftingLlama
from pyfly_cpp.machine import memory
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.machine.processes import Process
from pyfly_cpp.models.named import model_file
from pyfly_cpp.ranges import require_integer

_CELLS = 256  # llama.cpp's caches are multiples of it


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("the thread of a FlyBatch evaluates for it; submit() a request, or use a FlyLlama.")


class BatchLlama(DraftingLlama):
    """The `Llama` of a `FlyBatch`: chat formats of llama_cpp, and samplers, need one. It evaluates nothing.

    The requests share one cache. One may hold n_ctx tokens and no more, so that its limit does not depend
    on the others. Unless flash_attn is set, llama.cpp uses flash attention if the backend has it: without it
    each row goes through the cells of all requests (benchmarks/results/throughput.md).
    """

    _public_name = "FlyBatch"
    _close_waits = True

    eval = generate = sample = embed = save_state = load_state = _refuse

    def __init__(
        self, model_path: str | os.PathLike[str], n_parallel: int, n_ctx: int, n_cells: int | None, **kwargs: Any
    ) -> None:
        """Arguments as of `FlyBatch`."""
        most = llama_cpp.llama_max_parallel_sequences()
        self.n_parallel = require_integer("{n_parallel}", n_parallel, 1, most)
        require_integer("n_ctx", n_ctx, 0)
        if kwargs.get("embedding"):
            raise ValueError("a FlyBatch generates text; for embeddings use a FlyLlama with embedding=True.")
        if kwargs.get("chat_handler") is not None:
            raise ValueError(
                "a FlyBatch takes no chat_handler, because llama-cpp-python's handlers of images and sound need a "
                "context of their own; use a FlyLlama."
            )
        if str(kwargs.get("chat_format")).startswith("functionary"):
            raise ValueError(
                f"the chat format {kwargs['chat_format']!r} redirects the output of the whole process, which several "
                "requests at a time cannot share; use a FlyLlama, or the model's own chat template."
            )
        self._may_choose_attention = kwargs.get("flash_attn") is None
        if self._may_choose_attention:
            kwargs["flash_attn"] = True
        kwargs.pop("logits_all", None)  # log-probabilities do not need it
        model_path = model_file(model_path)
        require_gguf(model_path)
        info = _native.inspect_model(model_path)
        n_ctx = n_ctx or info.n_positions or info.n_ctx_train or _CELLS
        least = _rounded_up(n_ctx)
        self._n_ctx_of_request = n_ctx if info.n_positions else least
        n_all = least * self.n_parallel if n_cells is None else require_integer("n_cells", n_cells, least)
        if n_all >= 2**31:
            raise ArgumentError(
                f"{n_parallel} requests of {n_ctx} tokens are more than a cache can hold; lower {{n_ctx}}."
            )
        n_cells = _rounded_up(n_all)
        if self._n_ctx_of_request <= info.n_ctx_short < n_cells:
            # llama.cpp chooses the RoPE scaling by the size of the whole cache; the size of one request decides here.
            key = f"{info.architecture}.rope.scaling.original_context_length"
            kwargs["kv_overrides"] = {key: n_cells, **(kwargs.get("kv_overrides") or {})}
            kwargs["yarn_orig_ctx"] = kwargs.get("yarn_orig_ctx") or info.n_ctx_short
        try:
            super().__init__(model_path, n_ctx=n_cells, **kwargs)
        except ValueError as error:
            if not self._bytes_of_context or "could not make a context" not in str(error):
                raise
            raise ArgumentError(
                f"llama.cpp could not make a context for {n_parallel} requests of {n_ctx} tokens: {self._each_takes}"
            ) from error
        self._access.process = Process(self._public_name)  # also with one thread: others step and read

    def _adapt(self, params: Any) -> None:
        """For several sequences in one cache."""
        params.n_seq_max = self.n_parallel
        params.kv_unified = True
        if self._may_choose_attention:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO

    def _too_large(self, n_ctx: int, need: str) -> str:
        return f"{counted(self.n_parallel, 'request')} of {self._n_ctx_of_request} tokens {need}: {self._each_takes}"

    @property
    def _each_takes(self) -> str:
        """The end of messages on too little memory."""
        return f"each takes {memory.in_words((self._bytes_of_context or 0) // self.n_parallel)}; lower {{room}}."


def _rounded_up(n: int) -> int:
    return -(-n // _CELLS) * _CELLS
