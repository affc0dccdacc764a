"""The arguments that `FlyLlama` passes on to `llama_cpp.Llama`, with their types, for editors and type checkers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from typing_extensions import TypedDict

F = TypeVar("F", bound=Callable[..., Any])


def described_by(original: Any) -> Callable[[F], F]:
    """Gives a method the signature and docstring of one of `llama_cpp.Llama`, for people. Type checkers keep its
    own: that of the base class has no types for them."""

    def describe(method: F) -> F:
        functools.update_wrapper(method, original)
        return method

    return describe


class LlamaArguments(TypedDict, total=False):
    """Those of `llama_cpp.Llama`, except that thread counts may be "auto"."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_gpu_layers: int
    n_threads: int | str | None
    n_threads_batch: int | str | None
    flash_attn: bool
    type_k: int | None
    type_v: int | None
    chat_format: str | None
    chat_handler: Any
    seed: int
    verbose: bool
    split_mode: int
    main_gpu: int
    tensor_split: list[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: dict[str, bool | int | float | str] | None
    rope_scaling_type: int | None
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    pooling_type: int
    attention_type: int
    logits_all: bool
    embedding: bool
    offload_kqv: bool
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    lora_scale: float
    lora_path: str | os.PathLike[str] | None
    numa: bool | int
    draft_model: Any
    tokenizer: Any
    spm_infill: bool


class _Sampling(TypedDict, total=False):
    """The arguments that all completions share."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    stream: bool
    stop: str | list[str] | None
    seed: int | None
    max_tokens: float | None
    presence_penalty: float
    frequency_penalty: float
    repeat_penalty: float
    tfs_z: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    model: str | None
    logits_processor: Any
    grammar: Any
    logit_bias: dict[int, float] | None


class CompletionArguments(_Sampling, total=False):
    """Those of `create_completion`, except for the prompt."""

    suffix: str | None
    logprobs: int | None
    echo: bool
    stopping_criteria: Any


class ChatArguments(_Sampling, total=False):
    """Those of `create_chat_completion`, except for the messages."""

    functions: Sequence[Any] | None
    function_call: Any
    tools: Sequence[Any] | None
    tool_choice: Any
    response_format: Any
    logprobs: bool | None
    top_logprobs: int | None
