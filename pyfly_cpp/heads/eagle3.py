"""The EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyfly_cpp.heads.layers import AttentionBlock, RMSNorm, linear
from pyfly_cpp.heads.ridge import Ridge
from pyfly_cpp.heads.shapes import Eagle3Shape


class Eagle3Block(AttentionBlock):
    """`attn_norm` norms the token's embedding, `attn_norm_2` the hidden state; the attention reads both."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape, 2 * shape.n_embd)
        self.attn_norm = RMSNorm(shape.n_embd, shape.norm_eps)
        self.attn_norm_2 = RMSNorm(shape.n_embd, shape.norm_eps)
        self.ffn_norm = RMSNorm(shape.n_embd, shape.norm_eps)


class Passage(NamedTuple):
    """Three rows in a row, many times."""

    embeddings: tuple[Tensor, Tensor]
    """Of the tokens of the second and the third row, [n, n_embd] each."""
    features: tuple[Tensor, Tensor]
    """Of the first and the second row, [n, 3 * n_embd_target] each."""
    states: tuple[Tensor, Tensor, Tensor]
    """What the output matrix reads there, before its norm's weight and of root mean square 1: [n, n_embd] each."""


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
        """Norm and output matrix begin as the target's own.

        Args:
            output: The target's output matrix, the rows of `d2t`: [n_draft_vocab, n_embd].
            output_norm: Weight of the norm before it, [n_embd].
        """
        with torch.no_grad():
            self.output.weight.copy_(output)
            self.output_norm.weight.copy_(output_norm)

    def level(self, features: Tensor) -> None:
        """Lets the norm of the features give each the same weight: they differ by orders of magnitude. features
        [row, 3 * n_embd_target]: a sample."""
        normed = self.enc["output_norm"](features)
        with torch.no_grad():
            self.enc["output_norm"].weight.copy_(1 / normed.square().mean(0).sqrt().clamp_min(1e-4))

    def attend_to_itself(self) -> None:
        """Lets each row look at itself first, whose token it would else have to find: keys begin as the queries."""
        q, k = self.block.attn_q.weight, self.block.attn_k.weight
        with torch.no_grad():
            q.mul_(1.5)
            k.copy_(q[: len(k)])

    def begin_linear(self, chunks: Callable[[], Iterable[Passage]]) -> None:
        """Lets the head begin as ridge regressions of the target's last state, which its output matrix reads: the fused
        features as that of their own row, the attention's values as what is missing for the next row, and behind random
        gates the feed-forward as what is still missing. Needs as many heads of keys as of queries, as wide as the
        embedding together; else it does nothing. `chunks` gives the passages anew each time."""
        block, n_embd = self.block, self.shape.n_embd
        if not block.attn_output.weight.shape == block.attn_v.weight.shape[:1] * 2 == (n_embd, n_embd):
            return
        with torch.no_grad():
            block.ffn_down.weight.zero_()
            block.attn_output.weight.copy_(torch.eye(n_embd))
            fused, values = Ridge(), Ridge()
            for chunk in chunks():
                fused.add(self.enc["output_norm"](chunk.features[1]), chunk.states[1])
            self.fc.weight.copy_(fused.solve())
            for chunk in chunks():
                hidden = self.fuse(chunk.features[1])
                values.add(self.enter(chunk.embeddings[1], hidden)[1], chunk.states[2] - hidden)
            block.attn_v.weight.copy_(values.solve())
            values, down = Ridge(), Ridge()
            for chunk in chunks():
                for x, missing in self._at_two_depths(chunk):
                    values.add(x, missing)
            block.attn_v.weight.copy_(values.solve())
            for chunk in chunks():
                for x, missing in self._at_two_depths(chunk):
                    left = missing - block.attn_v(x)
                    residual = chunk.states[2] - left
                    y = block.ffn_norm(residual)
                    down.add(F.silu(block.ffn_gate(y)) * block.ffn_up(y), left)
            block.ffn_down.weight.copy_(down.solve())

    def _at_two_depths(self, chunk: Passage) -> Iterator[tuple[Tensor, Tensor]]:
        """The attention's input and what it should add, where a draft begins and one token further."""
        first = self.fuse(chunk.features[0])
        given = first + self.block.attn_v(self.enter(chunk.embeddings[0], first)[1])
        for hidden in (self.fuse(chunk.features[1]), given):
            yield self.enter(chunk.embeddings[1], hidden)[1], chunk.states[2] - hidden

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
