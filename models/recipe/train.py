"""Training of the parts. The heads and the draft learn what their frozen target would say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyfly_cpp.heads.eagle3 import Eagle3Head
from pyfly_cpp.heads.precision import autocast
from pyfly_cpp.heads.unroll import Head, unroll
from recipe import dflash, eagle3, qwen35, shapes
from recipe.dflash import DFlashHead
from recipe.folder import PARTS
from recipe.llama import Llama
from recipe.qwen35 import MTPBlock, Qwen35
from recipe.windows import Documents, batches

WARM_UP = 20
STEP_WEIGHTS = (1.0, 0.8, 0.64)
"""Of the unrolled steps of a head, and so of the first, second and third token of a draft."""


@dataclass(frozen=True)
class Plan:
    """How long and how fast a part learns."""

    n_steps: int
    learning_rate: float


PLANS = {
    "target": Plan(500, 2.5e-3),
    "draft": Plan(480, 4e-3),
    "eagle3": Plan(360, 2.5e-3),
    "qwen35": Plan(320, 2.5e-3),
    "mtp": Plan(300, 2.5e-3),
    "dflash": Plan(400, 2.5e-3),
    "dspark": Plan(400, 2.5e-3),
}
N_BLOCKS = 16
"""Blocks that a head which drafts blocks learns from in each window."""


@dataclass(frozen=True)
class Training:
    """The settings of a run."""

    documents: Documents
    seed: int
    steps_scale: float
    log: Callable[[str], None]

    def n_steps(self, part: str) -> int:
        """Steps of a part, at least one."""
        return max(1, round(PLANS[part].n_steps * self.steps_scale))

    def seed_of(self, part: str) -> int:
        """Every part has a seed of its own, so that it does not matter what was trained before it in the process."""
        return self.seed * len(PARTS) + PARTS.index(part)


def train_target(training: Training) -> Llama:
    """The llama target, on the text itself."""
    _begin(training, "target")
    model = Llama(shapes.TARGET)
    _optimise(training, "target", model, lambda tokens: next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
    return model


def train_draft(training: Training, target: Llama) -> Llama:
    """A smaller llama, on the target's distribution."""
    _begin(training, "draft")
    model = Llama(shapes.DRAFT)

    def loss(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(tokens[:, :-1])
        return distillation_loss(model(tokens[:, :-1]), wanted)

    _optimise(training, "draft", model, loss)
    return model


def train_eagle3(training: Training, target: Llama) -> Eagle3Head:
    """The EAGLE-3 head, on the target's distribution over the head's vocabulary."""
    _begin(training, "eagle3")
    head = Eagle3Head(shapes.EAGLE3, most_frequent(training.documents, shapes.EAGLE3.n_draft_vocab))
    assert target.output is not None
    head.start_from(target.output.weight[head.d2t], target.output_norm.weight)

    def loss(tokens: Tensor) -> Tensor:
        return unrolled_loss(head, *eagle3.inputs(target, head, tokens[:, :-1]))

    _optimise(training, "eagle3", head, loss)
    return head


def train_qwen35(training: Training) -> Qwen35:
    """The trunk of the hybrid, on the text itself."""
    _begin(training, "qwen35")
    model = Qwen35(shapes.QWEN35)
    _optimise(training, "qwen35", model, lambda tokens: next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
    return model


def train_mtp(training: Training, trunk: Qwen35) -> MTPBlock:
    """The MTP block, on the trunk's distribution."""
    _begin(training, "mtp")
    trunk.requires_grad_(False)
    head = MTPBlock(shapes.QWEN35, trunk.output)
    head.start_from(trunk)
    _optimise(training, "mtp", head, lambda tokens: unrolled_loss(head, *qwen35.inputs(trunk, tokens[:, :-1])))
    return head


def train_dflash(training: Training, target: Llama, part: str, shape: shapes.DFlashShape) -> DFlashHead:
    """A DFlash or DSpark head, on the target's distribution. Half of the steps see whole blocks, the others half and a
    quarter of one: a short draft takes a short block."""
    _begin(training, part)
    head = DFlashHead(shape)
    head.start_from(target.output_norm.weight)
    lengths = (shape.block_size, shape.block_size // 2, shape.block_size, shape.block_size // 4)
    n_steps = 0

    def loss(tokens: Tensor) -> Tensor:
        nonlocal n_steps
        n_rows, n_steps = lengths[n_steps % len(lengths)], n_steps + 1
        anchors = torch.randint(1, tokens.shape[1] - n_rows, (len(tokens), N_BLOCKS))
        return dflash.loss(target, head, tokens[:, :-1], anchors, n_rows)

    _optimise(training, part, head, loss)
    return head


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def distillation_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross-entropy in nats against softmax(wanted)."""
    return F.cross_entropy(logits.flatten(0, -2).float(), wanted.flatten(0, -2).float().softmax(-1))


def unrolled_loss(head: Head, embeddings: Tensor, hidden: Tensor, wanted: Tensor) -> Tensor:
    """The weighted mean over the steps of `unroll`."""
    steps = enumerate(unroll(head, embeddings, hidden, len(STEP_WEIGHTS)))
    losses = [STEP_WEIGHTS[s] * distillation_loss(logits[:, s:], wanted[:, s:]) for s, (_, logits) in steps]
    return torch.stack(losses).sum() / sum(STEP_WEIGHTS)


def most_frequent(documents: Documents, n: int) -> Tensor:
    """The n token ids that occur most often, ascending."""
    counts = np.bincount(np.concatenate(documents), minlength=shapes.N_VOCAB)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:n]))


def _begin(training: Training, part: str) -> None:
    torch.manual_seed(training.seed_of(part))


def _optimise(training: Training, part: str, model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> None:
    """AdamW with a short warm-up and a cosine down to 5 %, in bfloat16 where that is faster."""
    plan, n_steps = PLANS[part], training.n_steps(part)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=True)

    def rate(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / n_steps))
        return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * cosine)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    n_parameters = sum(p.numel() for p in parameters)
    training.log(f"{part}: {n_parameters / 1e6:.2f} M parameters, {n_steps} steps")
    started, n_tokens, losses = time.perf_counter(), 0, []
    for step, tokens in enumerate(_tensors(batches(training.documents, n_steps, training.seed_of(part))), 1):
        optimiser.zero_grad(set_to_none=True)
        with autocast("cpu"):
            loss = loss_of(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        n_tokens += tokens[:, :-1].numel()
        losses.append(loss.item())
        if step % 20 == 0 or step == n_steps:
            seconds = time.perf_counter() - started
            recent = sum(losses[-20:]) / len(losses[-20:])
            training.log(f"{part}: step {step}/{n_steps}, loss {recent:.3f}, {n_tokens / seconds:.0f} tokens/s")
    training.log(f"{part}: {n_tokens / 1e6:.2f} M tokens in {time.perf_counter() - started:.0f} s")
    model.requires_grad_(False)


def _tensors(arrays: Iterable[npt.NDArray[np.int64]]) -> Iterator[Tensor]:
    return map(torch.from_numpy, arrays)
