"""The arguments that `FlyLlama` passes on to `llama_cpp.Llama`, with their types, for editors and type checkers."""

from __future__ import annotations

import os
from typing import Any

from typing_extensions import TypedDict


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
