"""DFlash and DSpark heads: small models that draft a whole block of tokens in one pass.

The target's hidden states of the tokens so far, fused, are keys and values of every block of layers. A block of rows
stands behind them: the last token of the text (the anchor), then mask tokens. Its rows see all of that and each other,
also those behind them. DFlash: row i proposes token i behind the anchor, the anchor's own row nothing. DSpark: row i
proposes token i + 1, and a Markov head adds to its logits what usually follows the token before; a confidence head
tells how likely it is to be right. Below: their losses and proposals for the llama target.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyfly_cpp.heads.layers import AttentionBlock, RMSNorm, linear, rotate
from recipe.llama import Llama
from recipe.shapes import DFlashShape


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
    """It borrows the target's token embedding and its output matrix."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(len(shape.target_layers) * shape.n_embd, shape.n_embd)
        self.enc = nn.ModuleDict({"output_norm": RMSNorm(shape.n_embd, shape.norm_eps)})
        self.blk = nn.ModuleList(DFlashBlock(shape) for _ in range(shape.n_layer))
        self.output_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        if shape.n_markov > 0:
            self.markov_w1 = nn.Embedding(shape.n_vocab, shape.n_markov)
            self.markov_w2 = linear(shape.n_markov, shape.n_vocab, scale=0.1)
            self.conf_proj = nn.Linear(shape.n_embd + shape.n_markov, 1)

    def start_from(self, output_norm: Tensor) -> None:
        """The last norm [n_embd] begins as the target's."""
        with torch.no_grad():
            self.output_norm.weight.copy_(output_norm)

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
        before = torch.arange(features.shape[1])
        positions = anchors[..., None] + torch.arange(n_rows)
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


def _hidden(target: Llama, head: DFlashHead, features: Tensor, anchors: Tensor, tokens: Tensor, n_rows: int) -> Tensor:
    """`DFlashHead.hidden` for blocks of n_rows behind the tokens [batch, block] at the anchors."""
    rows = torch.full((*tokens.shape, n_rows), head.shape.mask_token)
    rows[..., 0] = tokens
    return head.hidden(features, anchors, target.token_embd(rows))


def draft(target: Llama, head: DFlashHead, tokens: Tensor, drafted: Tensor) -> Tensor:
    """Logits [n, n_vocab] of the block behind tokens [row], the last of which is the anchor. With a Markov head they
    are those behind the tokens drafted [n]."""
    _, features = target.logits_and_features(tokens[None], head.shape.target_layers)
    assert features is not None and target.output is not None
    anchor, first = torch.tensor([[len(tokens) - 1]]), head.shape.first_row
    rows = _hidden(target, head, features, anchor, tokens[None, -1:], len(drafted) + first)[0, 0, first:]
    logits: Tensor = target.output(rows)
    if head.shape.n_markov > 0:
        logits = logits + head.bias(torch.cat([tokens[-1:], drafted[:-1]]))
    return logits


def loss(target: Llama, head: DFlashHead, tokens: Tensor, anchors: Tensor, n_rows: int) -> Tensor:
    """Mean cross-entropy in nats of the blocks behind the anchors against the target's softmax, rows weighted less the
    further they are from the anchor; with a confidence head, a tenth of its binary cross-entropy on top.

    Args:
        tokens: [batch, row]; every block lies within.
        anchors: Positions, [batch, block].
    """
    shape = head.shape
    with torch.no_grad():
        logits, features = target.logits_and_features(tokens, shape.target_layers)
    assert features is not None and target.output is not None
    first = shape.first_row
    # Row i stands behind the token at anchor + i - first, and so does the target's row there.
    behind = anchors[..., None] + torch.arange(n_rows - first)
    hidden = _hidden(target, head, features, anchors, tokens.gather(1, anchors), n_rows)[:, :, first:]
    own: Tensor = target.output(hidden)
    batch = torch.arange(len(tokens))[:, None, None]
    previous, wanted = tokens[batch, behind], logits[batch, behind]
    if shape.n_markov > 0:
        own = own + head.bias(previous)
    losses = F.cross_entropy(own.flatten(0, -2).float(), wanted.flatten(0, -2).float().softmax(-1), reduction="none")
    weights = torch.exp(-torch.arange(behind.shape[-1]) / shape.n_decay)
    mean = (losses.view(behind.shape) * weights).sum() / weights.sum() / behind[..., 0].numel()
    if shape.n_markov == 0:
        return mean
    is_right = (own.argmax(-1) == wanted.argmax(-1)).float()
    rate = head.confidence(hidden.detach(), previous).float()
    return mean + 0.1 * F.binary_cross_entropy_with_logits(rate, is_right)
