"""DFlash and DSpark heads: small models that draft a whole block of tokens in one pass.

The target's hidden states of the tokens so far, fused, are keys and values of every block of layers. A block of rows
stands behind them: the last token of the text (the anchor), then mask tokens. Its rows see all of that and each other,
also those behind them. DFlash: row i proposes token i behind the anchor, the anchor's own row nothing. DSpark: row i
proposes token i + 1, and a Markov head adds to its logits what usually follows the token before; a confidence head
tells how likely it is to be right.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyfly_cpp.heads.layers import AttentionBlock, RMSNorm, linear, rotate
from pyfly_cpp.heads.shapes import DFlashShape


class DFlashBlock(AttentionBlock):
    """Queries and keys are normed for each head. Keys and values of the fused states come from the same matrices as the
    block's own."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape, shape.n_embd)
        self.attn_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        self.attn_q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.attn_k_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.ffn_norm = RMSNorm(shape.n_embd, shape.norm_eps)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., row, n_embd] at positions [..., row]: [..., head, row, head_dim]."""
        return self.turned(self.attn_q_norm(self.heads(self.attn_q(x))), positions)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same for keys and values, for all query heads."""
        k = self.turned(self.attn_k_norm(self.heads(self.attn_k(x))), positions)
        v = self.heads(self.attn_v(x))
        n = self.shape.n_head // self.shape.n_head_kv
        return k.repeat_interleave(n, dim=-3), v.repeat_interleave(n, dim=-3)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., head, row, head_dim] at positions [..., row], by RoPE."""
        return rotate(x, positions[..., None, :], self.shape.n_rot, self.shape.rope_base)

    def heads(self, x: Tensor) -> Tensor:
        """[..., row, heads * head_dim] to [..., heads, row, head_dim]."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(-2, -3)


class DFlashHead(nn.Module):
    """It borrows the target's token embedding, and its output matrix unless it has a vocabulary of its own, `d2t`
    [n_draft_vocab], ids of the target."""

    d2t: Tensor

    def __init__(self, shape: DFlashShape, d2t: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(len(shape.target_layers) * shape.n_embd, shape.n_embd)
        self.enc = nn.ModuleDict({"output_norm": RMSNorm(shape.n_embd, shape.norm_eps)})
        self.blk = nn.ModuleList(DFlashBlock(shape) for _ in range(shape.n_layer))
        self.output_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        n_vocab = shape.n_draft_vocab or shape.n_vocab
        if d2t is not None:
            self.output = linear(shape.n_embd, n_vocab)
            self.register_buffer("d2t", d2t)
        if shape.n_markov > 0:
            self.markov_w1 = nn.Embedding(shape.n_vocab, shape.n_markov)
            self.markov_w2 = linear(shape.n_markov, n_vocab, scale=0.1)
            self.conf_proj = nn.Linear(shape.n_embd + shape.n_markov, 1)

    def start_from(self, output_norm: Tensor, output: Tensor | None = None) -> None:
        """The last norm [n_embd], and an output matrix of its own [n_draft_vocab, n_embd], begin as the target's."""
        with torch.no_grad():
            self.output_norm.weight.copy_(output_norm)
            if output is not None:
                self.output.weight.copy_(output)

    def level(self, features: Tensor) -> None:
        """Gives each feature the same weight, as they differ by orders of magnitude. features [row, n]: a sample."""
        with torch.no_grad():
            self.fc.weight.div_(features.square().mean(0).sqrt().clamp_min(1e-4))

    def hidden(self, features: Tensor, anchors: Tensor, embeddings: Tensor) -> Tensor:
        """The rows that the output matrix and the confidence head read.

        Args:
            features: Of the target, [batch, row, len(target_layers) * n_embd].
            anchors: Positions of the anchors, [batch, block]; a block sees the features before its anchor.
            embeddings: Of the blocks' tokens, [batch, block, n_rows, n_embd]: the anchor, then mask tokens.

        Returns:
            [batch, block, n_rows, n_embd]
        """
        fused = self.enc["output_norm"](self.fc(features))
        n_rows, x = embeddings.shape[2], embeddings
        before = torch.arange(features.shape[1], device=features.device)
        positions = anchors[..., None] + torch.arange(n_rows, device=features.device)
        is_hidden = (before >= anchors[..., None])[:, None, :, None, :]  # [batch, 1, block, 1, row]
        for block in self.blk:
            seen = block.keys_and_values(fused, before.expand(fused.shape[:2]))  # [batch, head, row, head_dim]
            y = block.attn_norm(x)
            q = block.queries(y, positions)  # [batch, block, head, n_rows, head_dim]
            own = block.keys_and_values(y, positions)
            scale = q.shape[-1] ** -0.5
            from_text = torch.einsum("abhqd,ahkd->ahbqk", q, seen[0]).float() * scale
            from_text = from_text.masked_fill(is_hidden, -torch.inf)
            from_block = torch.einsum("abhqd,abhkd->ahbqk", q, own[0]).float() * scale
            if self.shape.is_causal:
                above = torch.ones(n_rows, n_rows, dtype=torch.bool, device=features.device).triu(1)
                from_block = from_block.masked_fill(above, -torch.inf)
            weights = torch.cat([from_text, from_block], dim=-1).softmax(-1).to(q.dtype)
            mixed = torch.einsum("ahbqk,ahkd->abqhd", weights[..., : len(before)], seen[1].to(q.dtype))
            mixed = mixed + torch.einsum("ahbqk,abhkd->abqhd", weights[..., len(before) :], own[1].to(q.dtype))
            x = x + block.attn_output(mixed.flatten(-2))
            x = x + block.feed_forward(block.ffn_norm(x))
        hidden: Tensor = self.output_norm(x)
        return hidden

    def bias(self, previous: Tensor) -> Tensor:
        """The Markov head's part of the logits behind these tokens [...]: [..., n_vocab]."""
        bias: Tensor = self.markov_w2(self.markov_w1(previous))
        return bias

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """The logit [...] of a proposal's being right, for hidden [..., n_embd] behind these tokens [...]."""
        rate: Tensor = self.conf_proj(torch.cat([hidden, self.markov_w1(previous).to(hidden.dtype)], dim=-1))
        return rate[..., 0]
