"""The sizes of the models, and the metadata that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyfly_cpp.heads import shapes
from pyfly_cpp.heads.shapes import Value

N_VOCAB = 1536
"""Tokens of the vocabulary, the control tokens included."""
N_WINDOW = 256
"""Tokens of a training window."""


@dataclass(frozen=True)
class Shape(shapes.Shape):
    """What all models here have."""

    n_embd: int = 256
    n_layer: int = 6
    n_ff: int = 768
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 64
    n_vocab: int = N_VOCAB
    n_ctx: int = 2048


@dataclass(frozen=True)
class LlamaShape(Shape):
    """A llama: the target, or a plain draft."""

    tied: bool = False
    """Whether the token embedding is the output matrix as well."""


@dataclass(frozen=True)
class Eagle3Shape(Shape, shapes.Eagle3Shape):
    """An EAGLE-3 head."""

    n_layer: int = 1
    n_ff: int = 512
    n_embd_target: int = 256
    target_layers: tuple[int, int, int] = (1, 3, 5)
    n_draft_vocab: int = 1024


@dataclass(frozen=True)
class DFlashShape(Shape):
    """A head that drafts a block in one pass: DFlash, or DSpark with a Markov head."""

    n_layer: int = 2
    n_ff: int = 512
    target_layers: tuple[int, ...] = (1, 3, 5)
    """As of an EAGLE-3 head."""
    block_size: int = 16
    """Rows of a block, the anchor's among them."""
    mask_token: int = N_VOCAB - 3
    """Stands where a token is to be proposed: the end of a document."""
    n_markov: int = 0
    """Rank of the Markov head; 0: DFlash, which has none."""
    n_decay: float = 7.0
    """So many rows further, a row counts 1/e in the training."""

    @property
    def first_row(self) -> int:
        """The first row that proposes a token."""
        return 0 if self.n_markov > 0 else 1

    def fields(self) -> Mapping[str, Value]:
        fields = {
            **super().fields(),
            "block_size": self.block_size,
            "target_layers": list(self.target_layers),
            "attention.causal": False,
        }
        return fields if self.n_markov == 0 else {**fields, "sample_from_anchor": True, "has_confidence_head": True}


@dataclass(frozen=True)
class Qwen35Shape(Shape):
    """A hybrid of gated delta nets and attention with an MTP block behind the trunk."""

    n_layer: int = 4
    """Blocks of the trunk; the MTP block is one more."""
    n_rot: int = 16
    attention_interval: int = 2
    """Every so-manieth block is attention, the others are recurrent."""
    n_conv: int = 4
    """Taps of the causal convolution."""
    n_state: int = 32
    """Dimension of the recurrent heads' queries, keys and values."""
    n_key_heads: int = 4
    n_value_heads: int = 8

    def is_recurrent(self, layer: int) -> bool:
        """Whether a block of the trunk is a gated delta net."""
        return (layer + 1) % self.attention_interval != 0

    def fields(self) -> Mapping[str, Value]:
        half = self.n_rot // 2
        sections = [(half + 2) // 3, (half + 1) // 3, half // 3]  # for text any split will do that adds up to half
        return {
            **super().fields(),
            "block_count": self.n_layer + 1,
            "nextn_predict_layers": 1,
            "rope.dimension_sections": [*sections, 0],
            "ssm.conv_kernel": self.n_conv,
            "ssm.inner_size": self.n_value_heads * self.n_state,
            "ssm.state_size": self.n_state,
            "ssm.time_step_rank": self.n_value_heads,
            "ssm.group_count": self.n_key_heads,
            "full_attention_interval": self.attention_interval,
        }


TARGET = LlamaShape()
DRAFT = LlamaShape(n_layer=2, n_ff=256, tied=True)
EAGLE3 = Eagle3Shape()
DFLASH = DFlashShape()
DSPARK = DFlashShape(n_markov=64)
QWEN35 = Qwen35Shape()
