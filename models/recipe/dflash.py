"""Losses and proposals of the DFlash and DSpark heads of the llama target."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyfly_cpp.heads.dflash import DFlashHead
from recipe.llama import Llama
from recipe.shapes import DFlashShape


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
    assert isinstance(shape, DFlashShape)
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
