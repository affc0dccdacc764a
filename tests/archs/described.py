"""Descriptions of our own, of architectures that people use: what llama.cpp asks for, in small numbers."""

from __future__ import annotations

import gguf
from weights import write_model

N_VOCAB, N_CTX = 128, 256

_COMMON = {
    "context_length": N_CTX,
    "vocab_size": N_VOCAB,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_WINDOW = {"attention.sliding_window": 32}
_HYBRID = {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 0]}  # attention, then a recurrent layer
_NEXTN = {"block_count": 3, "nextn_predict_layers": 1}

POPULAR = {
    "llama": {},
    "mistral3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": _EXPERTS,
    "qwen35": {
        "full_attention_interval": 2, "rope.dimension_sections": [4, 2, 2, 0], "rope.dimension_count": 16,
        "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
    },
    "gemma3": {"block_count": 6, **_WINDOW},
    "phi3": {"rope.dimension_count": 16, "rope.scaling.original_context_length": N_CTX},
    "deepseek2": {
        **_EXPERTS, "attention.head_count_kv": 1, "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32,
        "rope.dimension_count": 8, "attention.key_length": 40, "attention.value_length": 32,
        "attention.key_length_mla": 40, "attention.value_length_mla": 32, "leading_dense_block_count": 1,
        "expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_gating_func": 2,
    },
    "gpt-oss": {**_EXPERTS, **_WINDOW},
    "lfm2": {**_HYBRID, "shortconv.l_cache": 3},
    "granitehybrid": {
        **_HYBRID, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.time_step_rank": 4,
        "ssm.inner_size": 128,
    },
}  # fmt: skip

LEARNED = {"gpt2": {"attention.head_count_kv": 4}, "starcoder": {"attention.head_count_kv": 4}, "mpt": {}}
"""Whose positions are learned."""

HEADS = {
    "glm4moe": {**_NEXTN, **_EXPERTS, "expert_shared_count": 1, "leading_dense_block_count": 1},
    "glm4moe-sections": {
        **_NEXTN, **_EXPERTS, "expert_shared_count": 1, "leading_dense_block_count": 1,
        "rope.dimension_sections": [4, 2, 2, 0],
    },
    "mimo2": {
        **_NEXTN, **_EXPERTS, **_WINDOW, "attention.sliding_window_pattern": [0, 1, 0], "expert_gating_func": 2,
    },
}  # fmt: skip
"""With a NextN block."""


def make(name, description, path, left_out=()):
    """Writes a model without the tensors whose names contain one of left_out; returns its path. A name may have a
    suffix behind "-", but for gpt-oss."""
    architecture = name if name == "gpt-oss" else name.partition("-")[0]
    head = path.with_suffix(".description")
    writer = gguf.GGUFWriter(str(head), architecture)
    for key, value in {**_COMMON, **description}.items():
        one = value[0] if isinstance(value, list) else value
        add = writer.add_array if isinstance(value, list) else writer.add_float32 if isinstance(one, float) else None
        (add or writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"tok_{i}" for i in range(N_VOCAB)])
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    # The factors of two RoPE scalings: contexts of other sizes would be other models.
    write_model(head, path, left_out=("rope_factors", *left_out))
    head.unlink()
    return path
