"""Common parts of heads that draft token by token (EAGLE-3, MTP): a block that continues with its own hidden
states.

Row r of a head consumes token r and a hidden state of row r - 1, and proposes token r + 1. At step 0 the hidden state
is the target's; at a later step it is what the head itself gave at row r - 1 one step before, because the target has
not seen that token yet. So a draft that begins at row P is step 0 at row P, step 1 at P + 1, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyfly_cpp.heads.layers import AttentionBlock


class Head(Protocol):
    """A head that drafts."""

    @property
    def block(self) -> AttentionBlock:
        """The block with the attention."""

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream and the attention's input, from token embeddings and hidden states [batch, row, n_embd]."""

    def leave(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The next step's hidden state and the logits, from the residual stream after the attention."""


def unroll(head: Head, embeddings: Tensor, hidden: Tensor, n_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states [batch, row, n_embd] and logits [batch, row, vocabulary] of every step, for all rows together.
    Rows < s of step s mean nothing.

    Attention sees what the runtime's KV cache holds: of a draft that is at step s in row r, step-0 keys of the rows up
    to r - s, where it began, and the key of step j in row r - s + j.
    """
    rows = torch.arange(embeddings.shape[1], device=embeddings.device)
    keys, values = [], []
    for step in range(n_steps):
        residual, x = head.enter(embeddings, hidden)
        q, k, v, gate = head.block.project(x)
        keys.append(k)
        values.append(v)
        verified = (q @ keys[0].transpose(-1, -2)).float()
        verified = verified.masked_fill(rows > rows[:, None] - step, -torch.inf)
        own = [(q * _down(keys[j], step - j)).sum(-1, keepdim=True).float() for j in range(1, step + 1)]
        weights = (torch.cat([verified, *own], dim=-1) * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
        mixed = weights[..., : len(rows)] @ values[0]
        for j in range(1, step + 1):
            mixed = mixed + weights[..., len(rows) + j - 1, None] * _down(values[j], step - j)
        given, logits = head.leave(residual + head.block.finish(mixed, gate))
        yield given, logits
        hidden = _down(given, 1)


def _down(x: Tensor, n: int) -> Tensor:
    """Moves the rows of x [..., row, n_embd] down by n; zeros come in."""
    return F.pad(x, (0, 0, n, 0))[..., : x.shape[-2], :]
