"""The EAGLE-3 head of the llama target."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipe.layers import AttentionBlock, RMSNorm, linear
from recipe.llama import Llama
from recipe.shapes import Eagle3Shape


class Eagle3Block(AttentionBlock):
    """`attn_norm` norms the token's embedding, `attn_norm_2` the hidden state; the attention reads both."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape, 2 * shape.n_embd)
        self.attn_norm = RMSNorm(shape.n_embd)
        self.attn_norm_2 = RMSNorm(shape.n_embd)
        self.ffn_norm = RMSNorm(shape.n_embd)


class Eagle3Head(nn.Module):
    """It borrows the target's token embedding; it proposes only the tokens `d2t` [n_draft_vocab], the target's ids."""

    d2t: Tensor

    def __init__(self, shape: Eagle3Shape, d2t: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(3 * shape.n_embd_target, shape.n_embd)
        self.blk = nn.ModuleList([Eagle3Block(shape)])
        self.output_norm = RMSNorm(shape.n_embd)
        self.output = linear(shape.n_embd, len(d2t))
        self.register_buffer("d2t", d2t)

    def start_from(self, target: Llama) -> None:
        """Output and fusion begin as the target's own: the fused state is the input of the target's last block read."""
        assert target.output is not None
        n_embd = self.shape.n_embd
        with torch.no_grad():
            self.output.weight.copy_(target.output.weight[self.d2t])
            self.output_norm.weight.copy_(target.output_norm.weight)
            self.fc.weight.mul_(0.1)[:, -n_embd:] += torch.eye(n_embd)

    @property
    def block(self) -> Eagle3Block:
        return self.blk[0]

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.cat([self.block.attn_norm(embeddings), self.block.attn_norm_2(hidden)], dim=-1)

    def leave(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + self.block.feed_forward(self.block.ffn_norm(residual))
        return x, self.output(self.output_norm(x))


def inputs(target: Llama, head: Eagle3Head, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `unroll` takes, and what is to be learned, for tokens [batch, row]. There is no hidden state before token 0:
    the rows are those from token 1 on.

    Returns:
        Token embeddings and fused hidden states [batch, row - 1, n_embd], and the target's logits for the draft
        vocabulary [batch, row - 1, n_draft_vocab].
    """
    with torch.no_grad():
        logits, features = target.logits_and_features(tokens, head.shape.target_layers)
        embeddings = target.token_embd(tokens)
    assert features is not None
    return embeddings[:, 1:], head.fc(features[:, :-1]).float(), logits[:, 1:, head.d2t]
