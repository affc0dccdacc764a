"""Parts of heads, and of the models of models/recipe.

Modules and parameters carry the names that their tensors have in a GGUF file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyfly_cpp.heads.shapes import NORM_EPS, ROPE_BASE, Shape


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, n: int, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def linear(n_in: int, n_out: int, scale: float = 1.0) -> nn.Linear:
    """A matrix without bias, normally distributed; `scale` 1 keeps the variance of its input."""
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=scale / n_in**0.5)
    return layer


def rope(x: Tensor, n_rot: int, base: float = ROPE_BASE) -> Tensor:
    """`rotate` for rows at positions 0, 1, ..."""
    return rotate(x, torch.arange(x.shape[-2], device=x.device), n_rot, base)


def rotate(x: Tensor, positions: Tensor, n_rot: int, base: float = ROPE_BASE) -> Tensor:
    """Turns the first n_rot dimensions of x [..., row, head_dim] in pairs (i, i + n_rot / 2)."""
    half = n_rot // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = positions.float()[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half], x[..., half:n_rot], x[..., n_rot:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """Base of all blocks: the SwiGLU half."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ffn_gate = linear(shape.n_embd, shape.n_ff)
        self.ffn_up = linear(shape.n_embd, shape.n_ff)
        self.ffn_down = linear(shape.n_ff, shape.n_embd, scale=0.3)

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [..., n_embd], normed."""
        return self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))


class AttentionBlock(FeedForward):
    """Base of the blocks with grouped-query attention. A head that drafts calls `project` and `finish` itself, because
    its keys are not those of one causal pass."""

    def __init__(self, shape: Shape, n_in: int) -> None:
        super().__init__(shape)
        self.shape = shape
        self.attn_q = linear(n_in, shape.n_head * shape.head_dim)
        self.attn_k = linear(n_in, shape.n_head_kv * shape.head_dim)
        self.attn_v = linear(n_in, shape.n_head_kv * shape.head_dim)
        self.attn_output = linear(shape.n_head * shape.head_dim, shape.n_embd, scale=0.3)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x [batch, row, n_in], normed: queries, keys and values [batch, n_head, row, head_dim], and no gate."""
        q, k, v = (self.split_heads(f(x)) for f in (self.attn_q, self.attn_k, self.attn_v))
        n_rot, base = self.shape.n_rot, self.shape.rope_base
        return rope(q, n_rot, base), self.for_all_heads(rope(k, n_rot, base)), self.for_all_heads(v), None

    def finish(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """The attention's share of the residual stream, from the mixed values [batch, n_head, row, head_dim]."""
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return self.attn_output(mixed.transpose(1, 2).flatten(2))

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention over x [batch, row, n_in], normed."""
        q, k, v, gate = self.project(x)
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, row, heads * head_dim] to [batch, heads, row, head_dim]."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def for_all_heads(self, x: Tensor) -> Tensor:
        """Keys or values, each repeated for the query heads that share it."""
        return x.repeat_interleave(self.shape.n_head // self.shape.n_head_kv, dim=1)
