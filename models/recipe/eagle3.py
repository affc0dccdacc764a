"""What the EAGLE-3 head of the llama target learns from."""

from __future__ import annotations

import torch
from torch import Tensor

from pyfly_cpp.heads.eagle3 import Eagle3Head
from recipe.llama import Llama


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
    return embeddings[:, 1:], head.fuse(features[:, :-1]), logits[:, 1:, head.d2t]
