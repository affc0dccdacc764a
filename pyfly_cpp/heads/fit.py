"""Learning: a head from a states file, unrolled over several depths, as it will draft."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pyfly_cpp.errors import NotFiniteError
from pyfly_cpp.heads.eagle3 import Eagle3Head, Passage
from pyfly_cpp.heads.export import Weights, with_adjacent_rope
from pyfly_cpp.heads.precision import autocast
from pyfly_cpp.heads.shapes import Eagle3Shape
from pyfly_cpp.heads.state_file import Rows
from pyfly_cpp.heads.target import TargetFile
from pyfly_cpp.heads.texts import Text
from pyfly_cpp.heads.unroll import unroll
from pyfly_cpp.machine.files import replaced

N_DRAFT_VOCAB = 8192
"""Most tokens that a head can propose."""

STEP_WEIGHTS = (1.0, 0.8, 0.64)
"""Weights of the unrolled steps of a head: the first, second and third token of a draft."""

STATE_WEIGHT = 1.0
"""Weight of the mean squared distance between the head's states and the target's, both of size 1, next to the
cross-entropy in nats."""

N_ROWS = (512, 4096)
"""Rows of a training step: as many as make STEPS_OF_PASS, within these bounds."""

STEPS_OF_PASS = 300

N_PASSAGE = 4096
"""Rows that the first regressions of a head read at a time."""

N_REGRESSED = 65_536
"""Most rows that they read: at a width of 1536, 49,000 rows gave 1.67 tokens per step in two minutes, 146,000 gave
1.69 in seven, in which learning gains more."""

RATE = 3e-3
"""Learning rate of a head 256 wide. It falls with the square of the width, because a higher rate spoils the regressions
(5e-4 at a width of 1536)."""

WARM_UP = 20
"""Steps until the full learning rate."""

HELD_OUT = 16
"""One text in so many of a kind is held out."""

PATIENCE = 3
"""Passes without a better head, after which training ends."""


@dataclass(frozen=True)
class Span:
    """Where a text is in the states file."""

    begin: int
    end: int
    n_prompt: int
    kind: str
    is_held_out: bool


def spans_of(rows: Rows, texts: Sequence[Text]) -> list[Span]:
    """The places of the texts whose states are in the file, without those whose states are not numbers. Kinds with too
    few texts to hold one out are "other". What is held out stays so if more texts follow: the first few texts of all
    kinds are counted together."""
    ends = [end for end in itertools.accumulate(len(text.tokens) for text in texts) if end <= len(rows)]
    texts = texts[: len(ends)]
    n_of_kind = Counter(text.kind for text in texts)
    counted: Counter[str | None] = Counter()
    spans = []
    for text, end in zip(texts, ends):
        begin = end - len(text.tokens)
        if rows["ids"][begin, 0] >= 0:
            kind = text.kind if n_of_kind[text.kind] > HELD_OUT // 2 else "other"
            is_first = counted[text.kind] < HELD_OUT // 2
            is_held_out = counted[None] % HELD_OUT == 1 if is_first else counted[text.kind] % HELD_OUT == HELD_OUT // 2
            counted.update((text.kind, None) if is_first else (text.kind,))
            spans.append(Span(begin, end, text.n_prompt, kind, is_held_out))
    return spans


class TextWindow(NamedTuple):
    """Rows of some texts, padded: row r is of token r + 1 of a text."""

    embeddings: Tensor
    """The tokens' embeddings, [text, row, n_embd]."""
    features: Tensor
    """The target's states at the token before, [text, row, 3 * n_embd_target]."""
    ids: Tensor
    """The target's most probable next tokens, [text, row, N_TOP]; -1 in padding."""
    log_probs: Tensor
    """Log probabilities of `ids` in nats, [text, row, N_TOP]."""
    states: Tensor
    """The target's states as in `Passage`, [text, row, n_embd]."""
    follows: Tensor
    """Whether the text continues as the target would, [text, row]."""
    is_answer: Tensor
    """Whether a draft may begin there, [text, row]."""


class Dataset:
    """The states file as windows."""

    def __init__(self, rows: Rows, spans: Sequence[Span], target: TargetFile) -> None:
        self.rows = rows
        self.training = [span for span in spans if not span.is_held_out]
        self.held_out = [span for span in spans if span.is_held_out]
        tokens = np.asarray(rows["token"])
        self.n_vocab = target.n_vocab
        used = np.unique(tokens)
        self._index = np.zeros(target.n_vocab, np.int64)
        self._index[used] = np.arange(len(used))
        self._embeddings = torch.from_numpy(target.embeddings(used).astype(np.float16))
        norm = torch.from_numpy(target.output_norm)
        self._output_norm = torch.where(norm.abs() < 1e-4, torch.inf, norm)

    def frequent(self, n: int) -> npt.NDArray[np.int64]:
        """The n tokens that the target writes most often, ascending; the first of the vocabulary if it writes fewer."""
        said = np.zeros(self.n_vocab)
        for span in self.training:
            rows = self.rows[span.begin : span.end]
            np.add.at(said, rows["ids"].reshape(-1), np.exp(rows["log_probs"].astype(np.float32)).reshape(-1))
        return np.sort(np.argsort(-said, kind="stable")[:n])

    def sample(self, n: int, seed: int) -> Tensor:
        """Features of n rows, [n, 3 * n_embd_target]."""
        at = np.sort(np.random.default_rng(seed).integers(0, len(self.rows), n))
        return torch.from_numpy(self.rows["inputs"][at].astype(np.float32))

    def passages(self) -> Iterator[Passage]:
        """Rows to learn from, `N_REGRESSED` at most, some at a time."""
        at = np.concatenate([np.arange(span.begin + 2, span.end) for span in self.training])
        at = at[:: max(1, -(-len(at) // N_REGRESSED))]
        for begin in range(0, len(at), N_PASSAGE):
            now = at[begin : begin + N_PASSAGE]
            before, first = self.rows[now - 1], self.rows[now - 2]
            yield Passage(
                (self._embedded(before["token"]), self._embedded(self.rows["token"][now])),
                (_floats(first["inputs"]), _floats(before["inputs"])),
                (self._states(first["final"]), self._states(before["final"]), self._states(self.rows["final"][now])),
            )

    def prompts(self) -> list[list[int]]:
        """Of the texts that are not learned from, in their order: the kinds alternate about as they do in the file."""
        spans = [span for span in self.held_out if 0 < span.n_prompt < span.end - span.begin]
        return [self.rows["token"][span.begin : span.begin + span.n_prompt].tolist() for span in spans]

    def _embedded(self, tokens: npt.NDArray[np.int32]) -> Tensor:
        return self._embeddings[torch.from_numpy(self._index[tokens])].float()

    def _states(self, final: npt.NDArray[np.float16]) -> Tensor:
        states = _floats(final) / self._output_norm
        return of_size_one(states)

    def batches(self, spans: Sequence[Span], seed: int) -> Iterator[list[Span]]:
        """All spans, some rows at a time (`N_ROWS`), those of similar length together, in an order of chance."""
        rng = np.random.default_rng(seed)
        n_rows = min(max(sum(span.end - span.begin for span in self.training) // STEPS_OF_PASS, N_ROWS[0]), N_ROWS[1])
        order = sorted(spans, key=lambda span: span.end - span.begin + rng.integers(0, 32))
        batches: list[list[Span]] = [[]]
        for span in order:
            if (len(batches[-1]) + 1) * (span.end - span.begin) > n_rows and batches[-1]:
                batches.append([])
            batches[-1].append(span)
        for i in rng.permutation(len(batches)):
            yield batches[int(i)]

    def window(self, spans: Sequence[Span]) -> TextWindow:
        """The rows of some texts."""
        n = max(span.end - span.begin for span in spans) - 1
        rows = np.zeros((len(spans), n + 1), self.rows.dtype)
        rows["ids"] = -1
        answers = np.zeros((len(spans), n), bool)
        for i, span in enumerate(spans):
            n_text = span.end - span.begin
            rows[i, :n_text] = self.rows[span.begin : span.end]
            answers[i, max(span.n_prompt - 1, 0) : n_text - 1] = True
        next_token = np.concatenate([rows["token"][:, 2:], np.full((len(spans), 1), -1)], axis=1)
        now = rows[:, 1:]
        return TextWindow(
            self._embedded(now["token"]),
            torch.from_numpy(rows["inputs"][:, :-1].astype(np.float32)),
            torch.from_numpy(now["ids"].astype(np.int64)),
            torch.from_numpy(now["log_probs"].astype(np.float32)),
            self._states(now["final"]),
            torch.from_numpy(next_token == now["ids"][..., 0]),
            torch.from_numpy(answers),
        )


def of_size_one(x: Tensor) -> Tensor:
    """Rows of x [..., n] over their root mean square."""
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)


def _floats(halves: npt.NDArray[np.float16]) -> Tensor:
    return torch.from_numpy(halves.astype(np.float32))


class Acceptance(NamedTuple):
    """How often the first 1, 2, ... drafts are all right, at places in answers that were not learned from: a product of
    how often the first one is, the second one behind a right first one, and so on. Each is counted where the text
    continues with the drafts before it; nothing is known of other places."""

    by_depth: tuple[float, ...]
    by_kind: dict[str, tuple[float, ...]]

    @property
    def per_step(self) -> float:
        """Tokens of a step with as many drafts as there are depths, its own token included."""
        return 1 + sum(self.by_depth)


class Wanted(NamedTuple):
    """The target's most probable next tokens in the head's vocabulary."""

    ids: Tensor
    """Ids of the head, [..., N_TOP]; -1 for tokens that it cannot propose."""
    shares: Tensor
    """Probabilities of `ids` that add up to 1, [..., N_TOP]."""
    counts: Tensor
    """Whether there is anything to learn, [...]."""

    def loss(self, logits: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean cross-entropy in nats of rows [..., n_draft_vocab]."""
        said = logits.float().log_softmax(-1).gather(-1, self.ids.clamp_min(0))
        return self.mean(-(self.shares * said).sum(-1), weights)

    def mean(self, x: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean of x [...] over the rows that count."""
        weights = weights * self.counts
        return (x * weights).sum() / weights.sum().clamp_min(1)

    def is_right(self, logits: Tensor) -> Tensor:
        """Whether the proposal is the target's choice, [...]."""
        return self.ids[..., 0] == logits.detach().argmax(-1)


class Fit:
    """An EAGLE-3 head that learns, pass after pass over the texts."""

    def __init__(
        self, data: Dataset, target: TargetFile, layers: tuple[int, int, int], seed: int, n_passes: int
    ) -> None:
        torch.manual_seed(seed)
        shape = _shape(target, layers)
        self.data, self.seed, self.n_passes = data, seed, n_passes
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        d2t = torch.from_numpy(data.frequent(shape.n_draft_vocab))
        output = torch.from_numpy(target.outputs(d2t.numpy()))
        self.head = Eagle3Head(shape, d2t)
        self.head.start_from(output, torch.from_numpy(target.output_norm))
        self.head.level(data.sample(4096, seed))
        self.head.attend_to_itself()
        self.head.to(self.device)
        self._t2d = self._draft_ids()
        parameters = list(self.head.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        rate = RATE * (256 / shape.n_embd) ** 2
        self._optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
        self._rate = rate
        self.n_done = 0
        """Passes."""
        self.best: Acceptance | None = None
        self._best_head: dict[str, Tensor] | None = None
        self._n_worse = 0
        self._n_steps = 0

    def begin(self) -> None:
        """Runs the first regressions, which takes minutes; not needed before `load`."""
        self.head.cpu().begin_linear(self.data.passages)
        self.head.to(self.device)

    @property
    def has_ended(self) -> bool:
        return self.n_done >= self.n_passes or self._n_worse >= PATIENCE

    def learn(self, deadline: float, begun: float) -> Iterator[float]:
        """One pass; yields after each step how much of it is done, 0..1. At the deadline (`time.monotonic`) it ends.
        The learning rate falls with the passes, or with the time since `begun` if that ends first."""
        batches = list(self.data.batches(self.data.training, self.seed * 1000 + self.n_done))
        for i, spans in enumerate(batches):
            now = time.monotonic()
            if now > deadline:
                break
            done = max((self.n_done + i / len(batches)) / self.n_passes, (now - begun) / max(deadline - begun, 1e-9))
            self._n_steps += 1
            cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
            for group in self._optimiser.param_groups:
                group["lr"] = self._rate * cosine * min(1.0, self._n_steps / WARM_UP)
            self._optimiser.zero_grad(set_to_none=True)
            self._loss(self._window(spans)).backward()
            if nn.utils.clip_grad_norm_(self.head.parameters(), 1.0).isfinite():  # or else a state is out of range
                self._optimiser.step()
            yield (i + 1) / len(batches)
        self.n_done += 1

    def _window(self, spans: Sequence[Span]) -> TextWindow:
        return TextWindow(*(one.to(self.device) for one in self.data.window(spans)))

    def _wanted(self, window: TextWindow) -> Wanted:
        ids = torch.where(window.ids >= 0, self._t2d[window.ids.clamp_min(0)], -1)
        shares = window.log_probs.exp() * (ids >= 0)
        mass = shares.sum(-1)
        return Wanted(ids, shares / mass.clamp_min(1e-6)[..., None], mass > 0)

    def _loss(self, window: TextWindow) -> Tensor:
        wanted, weights = self._wanted(window), torch.ones(window.follows.shape, device=self.device)
        losses = []
        with autocast(self.device.type):
            for depth, (given, logits) in enumerate(self._unrolled(window)):
                weights[:, :depth] = 0
                missing = (of_size_one(given.float()) - window.states).square().mean(-1)
                loss = wanted.loss(logits, weights) + STATE_WEIGHT * wanted.mean(missing, weights)
                losses.append(STEP_WEIGHTS[depth] * loss)
        return torch.stack(losses).sum()

    def _right(self, window: TextWindow) -> list[Tensor]:
        """Of each depth: whether the proposal of the draft that begins in a row is the target's choice, [text, row]."""
        wanted = self._wanted(window)
        with autocast(self.device.type):
            return [_up(wanted.is_right(logits), depth) for depth, (_, logits) in enumerate(self._unrolled(window))]

    def _unrolled(self, window: TextWindow) -> Iterator[tuple[Tensor, Tensor]]:
        return unroll(self.head, window.embeddings, self.head.fuse(window.features), len(STEP_WEIGHTS))

    @torch.no_grad()
    def accept(self) -> Acceptance:
        """Acceptance on the held-out texts. A draft begins at every place of an answer."""
        n: dict[str, npt.NDArray[np.float64]] = {}
        for kind in {span.kind for span in self.data.held_out}:
            counts = np.zeros((2, len(STEP_WEIGHTS)))
            for spans in self.data.batches([s for s in self.data.held_out if s.kind == kind], 0):
                window = self._window(spans)
                rows = window.ids[..., 0] >= 0
                at = window.is_answer & rows
                for depth, right in enumerate(self._right(window)):
                    if depth:
                        at = _up(window.follows, depth - 1) & at & _up(rows, depth)
                    counts[0, depth] += int(at.sum())
                    at = at & right
                    counts[1, depth] += int(at.sum())
            n[kind] = counts
        total = sum(n.values(), np.zeros((2, len(STEP_WEIGHTS))))
        return Acceptance(_all_right(total), {kind: _all_right(counts) for kind, counts in n.items()})

    def judge(self) -> tuple[Acceptance, bool]:
        """The acceptance now, and whether it is the best so far."""
        found = self.accept()
        is_best = self.best is None or found.per_step > self.best.per_step
        self.best, self._n_worse = (found, 0) if is_best else (self.best, self._n_worse + 1)
        if is_best:
            self._best_head = {name: tensor.detach().cpu().clone() for name, tensor in self.head.state_dict().items()}
        return found, is_best

    def weights(self) -> Weights:
        """The weights of `best`, or the first ones if there is none yet, as the file has them. Raises NotFiniteError if
        one is not a number."""
        head = self.head.state_dict() if self._best_head is None else self._best_head
        weights = {name: tensor.cpu().numpy() for name, tensor in head.items()}
        if not all(np.isfinite(array).all() for array in weights.values()):
            raise NotFiniteError(
                "the head's weights have NaN or infinity, and the target's file may be damaged; download or convert it "
                "again."
            )
        return with_adjacent_rope(weights, self.head.shape)

    def save(self, path: Path) -> None:
        """Writes the state that `load` resumes from."""
        state = {
            "head": self.head.state_dict(), "optimiser": self._optimiser.state_dict(), "n_done": self.n_done,
            "n_steps": self._n_steps, "n_worse": self._n_worse, "best": self.best and tuple(self.best),
            "best_head": self._best_head, "n_rows": len(self.data.rows),
        }  # fmt: skip
        with replaced(path) as unfinished:
            torch.save(state, unfinished)

    def load(self, path: Path) -> None:
        """Continues from the state that `save` wrote; if there are more texts now, from the best head, with all passes
        before it."""
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location=self.device)
        has_more = state["n_rows"] != len(self.data.rows)
        self.head.load_state_dict(state["best_head" if has_more else "head"])
        self._t2d = self._draft_ids()
        self._optimiser.load_state_dict(state["optimiser"])
        self._n_steps = state["n_steps"]
        if not has_more:
            self.n_done, self._n_worse = state["n_done"], state["n_worse"]
            self.best, self._best_head = state["best"] and Acceptance(*state["best"]), state["best_head"]

    def _draft_ids(self) -> Tensor:
        """The head's own id of each token of the target, [n_vocab]; -1: it cannot propose it."""
        ids = torch.full((self.data.n_vocab,), -1, device=self.device)
        ids[self.head.d2t] = torch.arange(len(self.head.d2t), device=self.device)
        return ids


def _shape(target: TargetFile, layers: tuple[int, int, int]) -> Eagle3Shape:
    n_embd = target.n_embd
    return Eagle3Shape(
        n_embd=n_embd, n_layer=1, n_ff=256 * round(8 / 3 * n_embd / 256) or 256, n_head=target.n_head,
        n_head_kv=target.n_head, head_dim=target.head_dim, n_rot=target.head_dim, n_vocab=target.n_vocab,
        n_ctx=target.n_ctx, norm_eps=target.norm_eps, rope_base=target.rope_base, n_embd_target=n_embd,
        target_layers=layers, n_draft_vocab=min(N_DRAFT_VOCAB, target.n_vocab), norms_features=True,
    )  # fmt: skip


def _all_right(counts: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Shares of drafts that are right up to each depth, from the numbers of drafts seen and right [2, depth]."""
    return tuple(np.cumprod(counts[1] / np.maximum(counts[0], 1)).tolist())


def _up(x: Tensor, n: int) -> Tensor:
    """Moves the rows of x [text, row] up by n; False comes in."""
    return nn.functional.pad(x[:, n:], (0, n)) if n else x
