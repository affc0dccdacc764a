"""The EAGLE-3 head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyfly_cpp.heads.layers import AttentionBlock, RMSNorm, linear
from pyfly_cpp.heads.shapes import Eagle3Shape


class Eagle3Block(AttentionBlock):
    """`attn_norm` norms the token's embedding, `attn_norm_2` the hidden state; the attention reads both."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape, 2 * shape.n_embd)
        self.attn_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        self.attn_norm_2 = RMSNorm(shape.n_embd, shape.norm_eps)
        self.ffn_norm = RMSNorm(shape.n_embd, shape.norm_eps)


class Eagle3Head(nn.Module):
    """An EAGLE-3 head. It borrows the target's token embedding and proposes only the tokens `d2t` [n_draft_vocab],
    ids of the target."""

    d2t: Tensor

    def __init__(self, shape: Eagle3Shape, d2t: Tensor) -> None:
        super().__init__()
        self.shape = shape
        n_features = 3 * shape.n_embd_target
        self.enc = nn.ModuleDict({"output_norm": RMSNorm(n_features, shape.norm_eps)} if shape.norms_features else {})
        self.fc = linear(n_features, shape.n_embd)
        self.blk = nn.ModuleList([Eagle3Block(shape)])
        self.output_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        self.output = linear(shape.n_embd, len(d2t))
        self.register_buffer("d2t", d2t)

    def start_from(self, output: Tensor, output_norm: Tensor) -> None:
        """Output and fusion begin as the target's own: the fused state is the input of the target's last block read.

        Args:
            output: The target's output matrix, the rows of `d2t`: [n_draft_vocab, n_embd].
            output_norm: Weight of the norm before it, [n_embd].
        """
        n_embd = self.shape.n_embd
        with torch.no_grad():
            self.output.weight.copy_(output)
            self.output_norm.weight.copy_(output_norm)
            self.fc.weight.mul_(0.1)[:, -n_embd:] += torch.eye(n_embd)

    def level(self, features: Tensor) -> None:
        """Lets the norm of the features give each the same weight: they differ by orders of magnitude. The fused state
        stays the last of them, about as long as the head's own hidden state. features [row, 3 * n_embd_target]: a
        sample."""
        n_embd = self.shape.n_embd
        normed = self.enc["output_norm"](features)
        with torch.no_grad():
            sizes = normed.square().mean(0).sqrt().clamp_min(1e-4)
            self.enc["output_norm"].weight.copy_(1 / sizes)
            size = normed[:, -n_embd:].square().mean().sqrt()
            self.fc.weight[:, -n_embd:] = torch.diag(sizes[-n_embd:] / size)

    def attend_to_itself(self) -> None:
        """Lets each row look at itself first, whose token it would else have to find: keys begin as the queries."""
        q, k = self.block.attn_q.weight, self.block.attn_k.weight
        with torch.no_grad():
            q.mul_(1.5)
            k.copy_(q[: len(k)])

    def begin_linear(self, embeddings: Tensor, features: Tensor, following: Tensor) -> None:
        """Lets the head begin as the linear map, by ridge regression, from a token and the features before it to the
        last of the features behind it, which the target's own output reads well. Rows that look at themselves make the
        values of the attention such a map. Needs as many heads of keys as of queries, as wide as the embedding
        together; else it does nothing.

        Args:
            embeddings: Of tokens, [row, n_embd].
            features: Of the token before each, [row, 3 * n_embd_target].
            following: Of each itself, likewise.
        """
        block, n_embd = self.block, self.shape.n_embd
        if not block.attn_output.weight.shape == block.attn_v.weight.shape[:1] * 2 == (n_embd, n_embd):
            return
        with torch.no_grad():
            # Half of it with the hidden state that the head itself would give, were it right.
            last = _of_size_one(features[:, -n_embd:])
            hidden = torch.cat([self.fuse(features)[::2], last[1::2]])
            _, x = self.enter(torch.cat([embeddings[::2], embeddings[1::2]]), hidden)
            state = _of_size_one(following[:, -n_embd:])
            missing = torch.cat([state[::2], state[1::2]]) - hidden
            square = x.T @ x
            square.diagonal().add_(0.02 * square.diagonal().mean())
            block.attn_v.weight.copy_(torch.linalg.solve(square, x.T @ missing).T)
            block.attn_output.weight.copy_(torch.eye(n_embd))

    def fuse(self, features: Tensor) -> Tensor:
        """Features [..., 3 * n_embd_target] of the target to hidden states [..., n_embd]."""
        if self.shape.norms_features:
            features = self.enc["output_norm"](features)
        fused: Tensor = self.fc(features).float()
        return fused

    @property
    def block(self) -> Eagle3Block:
        return self.blk[0]

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.cat([self.block.attn_norm(embeddings), self.block.attn_norm_2(hidden)], dim=-1)

    def leave(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = residual + self.block.feed_forward(self.block.ffn_norm(residual))
        return x, self.output(self.output_norm(x))


def _of_size_one(x: Tensor) -> Tensor:
    """Rows of x [row, n_embd] over their root mean square."""
    return x / x.square().mean(-1, keepdim=True).sqrt()
