"""The llama architecture: the target, and the plain draft."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from pyfly_cpp.heads.layers import AttentionBlock, RMSNorm, linear
from recipe.shapes import LlamaShape


class LlamaBlock(AttentionBlock):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__(shape, shape.n_embd)
        self.attn_norm = RMSNorm(shape.n_embd)
        self.ffn_norm = RMSNorm(shape.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attn_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        nn.init.normal_(self.token_embd.weight, std=shape.n_embd**-0.5 if shape.tied else 0.3)
        self.blk = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.n_layer))
        self.output_norm = RMSNorm(shape.n_embd)
        self.output = None if shape.tied else linear(shape.n_embd, shape.n_vocab, scale=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, row, n_vocab] for tokens [batch, row]."""
        return self.logits_and_features(tokens, ())[0]

    def logits_and_features(self, tokens: Tensor, layers: Collection[int]) -> tuple[Tensor, Tensor | None]:
        """Besides the logits the inputs of some blocks, side by side: [batch, row, len(layers) * n_embd]."""
        x, features = self.token_embd(tokens), []
        for i, block in enumerate(self.blk):
            if i in layers:
                features.append(x)
            x = block(x)
        matrix = self.token_embd.weight if self.output is None else self.output.weight
        logits = nn.functional.linear(self.output_norm(x), matrix)
        return logits, torch.cat(features, dim=-1) if features else None
