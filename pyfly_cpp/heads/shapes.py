"""The sizes of heads, and the metadata of their files that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

Value = Union[int, float, bool, "list[int]"]
"""A value in a GGUF file's metadata. int: uint32, float: float32, list: int32."""

NORM_EPS = 1e-5
ROPE_BASE = 10000.0


@dataclass(frozen=True)
class Shape:
    """Sizes that every head has."""

    n_embd: int
    n_layer: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    """Leading dimensions of a head that RoPE turns."""
    n_vocab: int
    """Tokens of the target's vocabulary."""
    n_ctx: int
    """`context_length` of the file."""
    norm_eps: float = NORM_EPS
    rope_base: float = ROPE_BASE

    def fields(self) -> Mapping[str, Value]:
        """GGUF metadata by key, without the architecture's prefix."""
        return {
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.n_rot,
            "attention.layer_norm_rms_epsilon": self.norm_eps,
            "vocab_size": self.n_vocab,
        }


@dataclass(frozen=True)
class Eagle3Shape(Shape):
    """An EAGLE-3 head."""

    n_embd_target: int = 0
    target_layers: tuple[int, int, int] = (1, 2, 3)
    """Blocks of the target whose inputs the head reads, each 0..n_layer-1."""
    n_draft_vocab: int = 0
    """Tokens that it can propose."""
    norms_features: bool = False
    """Whether the inputs of the blocks are normed together before they are fused."""

    def fields(self) -> Mapping[str, Value]:
        return {
            **super().fields(),
            "target_layers": list(self.target_layers),
            "target_hidden_size": self.n_embd_target,
            "norm_before_residual": False,
            "norm_before_fc": self.norms_features,
        }
