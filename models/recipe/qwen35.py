"""The qwen35 architecture: a trunk of gated delta nets and gated attention, and the MTP block behind it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyfly_cpp.heads.layers import AttentionBlock, FeedForward, RMSNorm, linear, rope
from pyfly_cpp.heads.shapes import NORM_EPS
from recipe.shapes import Qwen35Shape

CHUNK = 64
"""Tokens that the delta rule takes at once."""


class GatedAttentionBlock(AttentionBlock):
    """Queries and keys are normed, and a gate as wide as the queries scales what the attention gives."""

    def __init__(self, shape: Qwen35Shape) -> None:
        super().__init__(shape, shape.n_embd)
        self.attn_q = linear(shape.n_embd, 2 * shape.n_head * shape.head_dim)  # of each head: query, then gate
        self.attn_q_norm = RMSNorm(shape.head_dim)
        self.attn_k_norm = RMSNorm(shape.head_dim)
        self.attn_norm = RMSNorm(shape.n_embd)
        self.post_attention_norm = RMSNorm(shape.n_embd)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        n_rot = self.shape.n_rot
        q, gate = self.attn_q(x).unflatten(-1, (self.shape.n_head, -1)).transpose(1, 2).chunk(2, dim=-1)
        k, v = self.split_heads(self.attn_k(x)), self.split_heads(self.attn_v(x))
        q, k = rope(self.attn_q_norm(q).to(v.dtype), n_rot), rope(self.attn_k_norm(k).to(v.dtype), n_rot)
        return q, self.for_all_heads(k), self.for_all_heads(v), gate

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attn_norm(x))
        return x + self.feed_forward(self.post_attention_norm(x))


class CausalConv(nn.Module):
    """Each channel on its own, over the last n_conv rows."""

    def __init__(self, n_channels: int, n_conv: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_channels, n_conv) * n_conv**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        n_conv, n_rows = self.weight.shape[1], x.shape[1]
        padded = F.pad(x, (0, 0, n_conv - 1, 0))
        return sum(padded[:, j : j + n_rows] * self.weight[:, j] for j in range(n_conv))


class DeltaNetBlock(FeedForward):
    """A linear attention whose state M [key, value] forgets by exp(g) and corrects what it says of k by beta."""

    def __init__(self, shape: Qwen35Shape) -> None:
        super().__init__(shape)
        self.shape = shape
        n_inner = shape.n_value_heads * shape.n_state
        n_channels = 2 * shape.n_key_heads * shape.n_state + n_inner
        self.attn_norm = RMSNorm(shape.n_embd)
        self.post_attention_norm = RMSNorm(shape.n_embd)
        self.attn_qkv = linear(shape.n_embd, n_channels)
        self.attn_gate = linear(shape.n_embd, n_inner)
        self.ssm_conv1d = CausalConv(n_channels, shape.n_conv)
        self.ssm_beta = linear(shape.n_embd, shape.n_value_heads)
        self.ssm_alpha = linear(shape.n_embd, shape.n_value_heads)
        # Half-lives from 1 to 100 tokens or so: softplus(-3) = 0.05 times 0.1 to 16.
        self.ssm_dt_bias = nn.Parameter(torch.full((shape.n_value_heads,), -3.0))
        self.ssm_a_log = nn.Parameter(torch.linspace(0.1, 16.0, shape.n_value_heads).log())
        self.ssm_norm = RMSNorm(shape.n_state)
        self.ssm_out = linear(n_inner, shape.n_embd, scale=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.recur(self.attn_norm(x))
        return x + self.feed_forward(self.post_attention_norm(x))

    def recur(self, x: Tensor) -> Tensor:
        """The block's first half, for x [batch, row, n_embd], normed."""
        shape = self.shape
        n_keys = shape.n_key_heads * shape.n_state
        mixed = F.silu(self.ssm_conv1d(self.attn_qkv(x).float()))
        heads = [part.unflatten(-1, (-1, shape.n_state)).transpose(1, 2) for part in mixed.split(
            [n_keys, n_keys, shape.n_value_heads * shape.n_state], dim=-1)]  # fmt: skip
        q, k = (self.unit(part).repeat(1, shape.n_value_heads // shape.n_key_heads, 1, 1) for part in heads[:2])
        beta = self.ssm_beta(x).float().sigmoid().transpose(1, 2)
        g = -self.ssm_a_log.exp() * F.softplus(self.ssm_alpha(x).float() + self.ssm_dt_bias)
        with torch.autocast("cpu", enabled=False):
            o = delta_rule(q * shape.n_state**-0.5, k, heads[2], g.transpose(1, 2), beta)
        gate = self.attn_gate(x).unflatten(-1, (-1, shape.n_state))
        return self.ssm_out((self.ssm_norm(o.transpose(1, 2)) * F.silu(gate)).flatten(2))

    @staticmethod
    def unit(x: Tensor) -> Tensor:
        """x over its length."""
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """For every row: M = exp(g) M;  M += k (x) beta (v - M^T k);  o = M^T q.

    A chunk is done at once. With G the sum of g since the chunk's begin, M0 the state there, and k_t (x) u_t what row t
    adds, u_t = beta_t (v_t - exp(G_t) M0^T k_t - sum over i < t of exp(G_t - G_i) (k_t . k_i) u_i): a triangular
    system.

    Args:
        q, k, v: [batch, head, row, n_state]
        g, beta: [batch, head, row]; g <= 0

    Returns:
        o [batch, head, row, n_state].
    """
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    outputs = []
    for begin in range(0, q.shape[2], CHUNK):
        rows = slice(begin, begin + CHUNK)
        qc, kc, vc, bc = q[:, :, rows], k[:, :, rows], v[:, :, rows], beta[:, :, rows, None]
        total = g[:, :, rows].cumsum(-1)
        # exp only of what is kept: above the diagonal the differences are positive and may overflow.
        difference = (total[..., :, None] - total[..., None, :]).tril()
        decay = difference.exp().tril()
        kk, qk = kc @ kc.transpose(-1, -2), qc @ kc.transpose(-1, -2)
        system = (bc * decay * kk).tril(-1)  # the ones on the diagonal are understood
        since_start = total.exp()[..., None]
        right = bc * (vc - since_start * (kc @ state))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(since_start * (qc @ state) + (decay * qk) @ u)
        to_end = (total[..., -1:] - total).exp()[..., None]
        state = since_start[:, :, -1:] * state + (kc * to_end).transpose(-1, -2) @ u
    return torch.cat(outputs, dim=2)


class Qwen35(nn.Module):
    """The trunk."""

    def __init__(self, shape: Qwen35Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        nn.init.normal_(self.token_embd.weight, std=0.3)
        self.blk = nn.ModuleList(
            DeltaNetBlock(shape) if shape.is_recurrent(i) else GatedAttentionBlock(shape) for i in range(shape.n_layer)
        )
        self.output_norm = RMSNorm(shape.n_embd)
        self.output = linear(shape.n_embd, shape.n_vocab, scale=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, row, n_vocab] for tokens [batch, row]."""
        return self.output(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the MTP block reads: [batch, row, n_embd], behind output_norm."""
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x)
        return self.output_norm(x)


class NextN(nn.Module):
    """Joins a token's embedding and a hidden state."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.eh_proj = linear(2 * n_embd, n_embd)
        self.enorm = RMSNorm(n_embd)
        self.hnorm = RMSNorm(n_embd)
        self.shared_head_norm = RMSNorm(n_embd)


class MTPBlock(GatedAttentionBlock):
    """The head: an attention block that goes on from the trunk's hidden states, with the trunk's output matrix."""

    def __init__(self, shape: Qwen35Shape, output: nn.Linear) -> None:
        super().__init__(shape)
        self.nextn = NextN(shape.n_embd)
        self.shared_output = [output]  # in a list: the trunk's, not a parameter of this block

    def start_from(self, trunk: Qwen35) -> None:
        """The hidden state begins as the larger part of what goes in, and the norm of the output as the trunk's."""
        n_embd = self.shape.n_embd
        with torch.no_grad():
            self.nextn.eh_proj.weight.mul_(0.5)[:, n_embd:] += torch.eye(n_embd)
            self.nextn.shared_head_norm.weight.copy_(trunk.output_norm.weight)

    @property
    def block(self) -> MTPBlock:
        return self

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        nextn = self.nextn
        x = nextn.eh_proj(torch.cat([nextn.enorm(embeddings), nextn.hnorm(hidden)], dim=-1)).float()
        return x, self.attn_norm(x)

    def leave(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + self.feed_forward(self.post_attention_norm(residual))
        hidden = self.nextn.shared_head_norm(x)
        return hidden, self.shared_output[0](hidden)


def inputs(trunk: Qwen35, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `unroll` takes, and what is to be learned, for tokens [batch, row]. Before row 0 there is no hidden state:
    zeros.

    Returns:
        Token embeddings and hidden states [batch, row, n_embd], and the trunk's logits [batch, row, n_vocab].
    """
    with torch.no_grad():
        hidden = trunk.hidden(tokens)
        logits = trunk.output(hidden)
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return trunk.token_embd(tokens), before, logits
