"""What llama.cpp and pyfly-cpp make of the exported files, against PyTorch, and how much is accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from torch import Tensor

from pyfly_cpp import FlyLlama
from pyfly_cpp.decoding.drafters import Drafter
from pyfly_cpp.heads.eagle3 import Eagle3Head
from pyfly_cpp.heads.unroll import Head, unroll
from recipe import dflash, eagle3, qwen35
from recipe.dflash import DFlashHead
from recipe.llama import Llama
from recipe.qwen35 import MTPBlock, Qwen35
from recipe.shapes import N_WINDOW

SETTINGS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
MOST_LOGIT_ERROR = 2e-2
"""Largest difference of a logit, F16 file against PyTorch in FP32."""
LEAST_SAME_ARGMAX = 0.99
N_TOKENS = 96
"""Tokens that are generated behind a prompt."""


Inputs = Callable[[Tensor], tuple[Tensor, Tensor]]
Logits = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Check:
    """A comparison with PyTorch; `text` says what was compared and what came out."""

    passed: bool
    text: str


@dataclass(frozen=True)
class Generation:
    """A greedy text and how it was drafted."""

    tokens: list[int]
    """The prompt's tokens, then the new ones."""
    drafts: list[tuple[int, list[int]]]
    """For every step with a draft: how many of the tokens it followed, and what was drafted."""


@dataclass(frozen=True)
class Acceptance:
    """How the drafts for some prompts fared."""

    generations: list[Generation]
    accepted: int
    drafted: int
    tokens_per_step: float

    def __str__(self) -> str:
        share = self.accepted / max(self.drafted, 1)
        return f"{self.accepted} of {self.drafted} drafts accepted, {share:.1%}; {self.tokens_per_step:.2f} per step"


def check_logits(path: Path, model: Llama | Qwen35, texts: list[str], tokenize: Callable[[str], list[int]]) -> Check:
    """Tokenizer and logits of the file against those of the model, on the first 256 tokens of each text."""
    llm = llama_cpp.Llama(str(path), logits_all=True, **SETTINGS)
    try:
        errors, same = [], []
        for text in texts:
            tokens = tokenize(text)
            if llm.tokenize(text.encode("utf-8"), add_bos=False, special=True) != tokens:
                return Check(False, f"{path.name}: llama.cpp tokenizes {text[:40]!r}... differently")
            llm.reset()
            llm.eval(tokens[:N_WINDOW])
            found = np.array(llm.scores[: llm.n_tokens])
            with torch.no_grad():
                wanted = model(torch.tensor([tokens[:N_WINDOW]]))[0].numpy()
            errors.append(float(np.abs(found - wanted).max()))
            same += (found.argmax(-1) == wanted.argmax(-1)).tolist()
    finally:
        llm.close()
    error, share = max(errors), float(np.mean(same))
    return Check(
        error <= MOST_LOGIT_ERROR and share >= LEAST_SAME_ARGMAX,  # False for NaN
        f"{path.name}: logits differ from PyTorch's by {error:.1e} at most (limit {MOST_LOGIT_ERROR:.0e}), same argmax "
        f"in {share:.2%} of {len(same)} rows",
    )


def measure_acceptance(target: Path, drafter: Drafter, prompts: list[str]) -> Acceptance:
    """Greedy texts behind the prompts, each of `N_TOKENS` tokens or up to its end."""
    llm = FlyLlama(target, drafter=drafter, trace=True, **SETTINGS)
    try:
        generations = [_generate(llm, prompt) for prompt in prompts]
        stats = llm.stats
    finally:
        llm.close()
    return Acceptance(generations, stats.matched, stats.drafted, stats.committed / max(stats.rounds, 1))


def _generate(llm: FlyLlama, prompt: str) -> Generation:
    tokens = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)[:N_WINDOW]
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    llm.reset()
    stream = llm.generate(tokens, temp=0.0)
    for token in itertools.islice(stream, N_TOKENS):
        tokens.append(token)
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
    stream.close()
    drafts = []
    for _, records in itertools.groupby(llm.records, key=lambda record: record.round):
        of_step = list(records)
        draft = [record.token for record in of_step if record.depth] + list(of_step[-1].rejected)
        if draft:
            drafts.append((of_step[0].position, draft))
    return Generation(tokens, drafts)


def check_drafts(name: str, generations: list[Generation], logits_of: Logits, d2t: Tensor | None) -> Check:
    """Whether what pyfly-cpp's drafter proposed is what the head in PyTorch would have, with the same tokens before it.

    Both take the largest logit, each of its own; so a proposal may be below PyTorch's largest by twice the error of a
    logit, where two are that close.

    Args:
        logits_of: Of the tokens before a draft [row] and the draft [n]: the head's logits [n, its vocabulary].
        d2t: The head's vocabulary, ids of the target; None: all.
    """
    worst, n_same, n_drafts = 0.0, 0, 0
    for generation in generations:
        for n_before, draft in generation.drafts:
            with torch.no_grad():
                rows = logits_of(torch.tensor(generation.tokens[:n_before]), torch.tensor(draft))
            for row, token in zip(rows, draft):
                index = torch.tensor([token]) if d2t is None else (d2t == token).nonzero()[:, 0]
                gap = float(row.max() - row[index]) if len(index) else float("inf")
                worst = max(worst, gap)
                n_same += gap == 0.0
                n_drafts += 1
    return Check(
        n_drafts > 0 and worst <= 2 * MOST_LOGIT_ERROR,
        f"{name}: {n_same} of {n_drafts} drafts are PyTorch's own, the others below its largest logit by {worst:.1e} "
        f"at most (limit {2 * MOST_LOGIT_ERROR:.0e})",
    )


def check_eagle3(name: str, generations: list[Generation], target: Llama, head: Eagle3Head) -> Check:
    """`check_drafts` for the EAGLE-3 head."""
    return check_drafts(name, generations, _unrolled(head, lambda x: eagle3.inputs(target, head, x)[:2]), head.d2t)


def check_mtp(name: str, generations: list[Generation], trunk: Qwen35, head: MTPBlock) -> Check:
    """`check_drafts` for the MTP block."""
    return check_drafts(name, generations, _unrolled(head, lambda x: qwen35.inputs(trunk, x)[:2]), None)


def check_dflash(name: str, generations: list[Generation], target: Llama, head: DFlashHead) -> Check:
    """`check_drafts` for a DFlash or DSpark head."""
    return check_drafts(name, generations, lambda before, draft: dflash.draft(target, head, before, draft), None)


def _unrolled(head: Head, inputs: Inputs) -> Logits:
    """Of a head that drafts step by step; `inputs`: of `unroll`, for tokens [1, row]."""

    def logits_of(before: Tensor, draft: Tensor) -> Tensor:
        embeddings, hidden = inputs(torch.cat([before, draft[:-1]])[None])
        steps = unroll(head, embeddings, hidden, len(draft))
        return torch.stack([logits[0, depth - len(draft)] for depth, (_, logits) in enumerate(steps)])

    return logits_of
