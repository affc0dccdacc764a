"""Trains a `Judge` from prompts of the user's own.

Mining, as AutoJudge does (arXiv 2504.20039): each prompt is decoded exactly while something drafts. If a draft is not
the target's choice, the core's numbers of that mismatch are kept (`FEATURES`), the draft's token is put in the place of
the choice, and the answer is decoded exactly to its end. The mismatch is harmless if the answer is still right. If no
answer is known, or exact decoding does not give it, the idea of SelfJudge (arXiv 2510.02329) decides: the mismatch is
harmless if the next `SPAN` tokens of the target's own answer, placed after the draft's token, are together at most
`DROP` nats less likely than they were. That takes one evaluation and no decoding.

Learning: a logistic regression with an L2 penalty, measured on prompts that it was not fitted to, in five folds. The
thresholds of gates that need no training are measured on the same mismatches, at the same loss.
The loss is the number of harmful mismatches accepted per answer. Each is counted as if it were the only one, so fewer
answers change than that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pyfly_cpp.bench.journal import Journal
from pyfly_cpp.bench.prompts import BenchPrompt
from pyfly_cpp.bench.tune import MIN_PROMPTS
from pyfly_cpp.decoding import Decoding, as_in_chat
from pyfly_cpp.decoding.gates import FEATURES, Judge
from pyfly_cpp.decoding.gates.judge import OF_DRAFT
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.stats import Record
from pyfly_cpp.evaluation.generation import Generated, Prompt
from pyfly_cpp.evaluation.parallel import Order, ParallelGenerator
from pyfly_cpp.evaluation.statistics import Floats

SPAN = 32
DROP = 3.0
N_FOLDS = 5


class MiningFile(Journal):
    """The mismatches of each prompt, those of earlier starts included: the file stays, for other fits."""

    KEPT = "mismatches that were mined"
    REMEDY = "choose another --mined, or delete it"

    def keep(self, row: dict[str, Any]) -> None:
        """Adds what was mined of a prompt."""
        self.rows.append(row)
        self.write(row)

    def mined(self, prompts: Sequence[BenchPrompt]) -> list[dict[str, Any]]:
        """What there is of these prompts, in their order, with the unit of each as `prompt`."""
        by_key = {row["key"]: row for row in self.rows}
        return [{**by_key[key], "prompt": one.unit} for one in prompts if (key := _key(one)) in by_key]


def _key(prompt: BenchPrompt) -> str:
    return hashlib.sha256(json.dumps([prompt.turns, prompt.answer]).encode()).hexdigest()[:16]


# ---- Mining ----------------------------------------------------------------------------------------------------------


class _Mismatch(NamedTuple):
    exact: Generated
    prompt: Prompt
    at: int
    """Tokens of the answer before it."""

    @property
    def record(self) -> Record:
        return self.exact.records[self.at]

    @property
    def tokens(self) -> list[int]:
        """Of the answer, up to the draft's token."""
        return [*self.exact.tokens[: self.at], self.record.rejected[0]]


def mine(
    generator: ParallelGenerator,
    prompts: Sequence[BenchPrompt],
    file: MiningFile,
    max_tokens: int,
    n_most: int,
    progress: Callable[[int, int], None],
) -> None:
    """Mines the prompts that are not in the file yet, as many at a time as the generator decodes.

    Args:
        n_most: Mismatches of each answer that are tried, evenly over it.
        progress: Called with (done, all) prompts.
    """
    there = {row["key"] for row in file.rows}
    left = [prompt for prompt in prompts if _key(prompt) not in there]
    for start in range(0, len(left), generator.n_parallel):
        chunk = left[start : start + generator.n_parallel]
        tries: list[tuple[BenchPrompt, bool, int, list[_Mismatch]]] = []
        for one, (prompt, exact) in zip(chunk, _answers(generator, chunk, max_tokens)):
            is_right = bool(one.answer) and one.answer.lower() in exact.text.lower()
            found = [
                _Mismatch(exact, prompt, i)
                for i, record in enumerate(exact.records[: len(exact.tokens) - 1])
                if record.features and record.reason == "gate"
            ]
            tried = [found[i * len(found) // n_most] for i in range(n_most)] if len(found) > n_most else found
            tries.append((one, is_right, len(found), tried))
        stays = _stay_right(
            generator, [(one, m) for one, is_right, _, tried in tries if is_right for m in tried], max_tokens
        ) | _stay_likely(generator, [m for _, is_right, _, tried in tries if not is_right for m in tried])
        for one, is_right, n, tried in tries:
            rows = [[*m.record.features, stays[id(m)]] for m in tried]
            checked = "answer" if is_right else "likelihood"
            file.keep({"key": _key(one), "checked": checked, "mismatches": n, "rows": rows})
        progress(len(prompts) - len(left) + start + len(chunk), len(prompts))


def _answers(
    generator: ParallelGenerator, prompts: Sequence[BenchPrompt], max_tokens: int
) -> list[tuple[Prompt, Generated]]:
    """The exact answer to the last turn of each prompt, with the features of its mismatches."""
    generator.llm.trace = True
    names = FEATURES
    talks: list[list[dict[str, str]]] = [[] for _ in prompts]
    out: dict[int, tuple[Prompt, Generated]] = {}
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        orders = []
        for i, prompt in enumerate(prompts):
            if turn < len(prompt.turns):
                talks[i].append({"role": "user", "content": prompt.turns[turn]})
                orders.append(Order(i, generator.render(talks[i]), max_tokens))
        while True:
            # It looks at every mismatch, and defers none.
            gate = Judge("mining", tuple((name, 0.0) for name in names), bias=-1.0)
            try:
                made = list(generator.generate_all(orders, Decoding(gate)))
                break
            except ValueError:
                if names != FEATURES:
                    raise
                names = tuple(name for name in FEATURES if name not in OF_DRAFT)  # a drafter without distributions
        for order, answer in made:
            talks[order.key].append({"role": "assistant", "content": answer.text})
            out[order.key] = order.prompt, answer
    return [out[i] for i in range(len(prompts))]


def _stay_right(
    generator: ParallelGenerator, tried: Sequence[tuple[BenchPrompt, _Mismatch]], max_tokens: int
) -> dict[int, bool]:
    """By the id of each mismatch, whether the answer is right with the draft's token."""
    generator.llm.trace = False
    orders = [
        Order((prompt, m), Prompt((*m.prompt.tokens, *m.tokens), m.prompt.stop), max_tokens - len(m.tokens))
        for prompt, m in tried
    ]
    out = {}
    for order, made in generator.generate_all(orders, as_in_chat()):
        prompt, mismatch = order.key
        text = generator.llm.detokenize(mismatch.tokens).decode("utf-8", "ignore") + made.text
        out[id(mismatch)] = prompt.answer.lower() in text.lower()
    return out


def _stay_likely(generator: ParallelGenerator, mismatches: Sequence[_Mismatch]) -> dict[int, bool]:
    """The same by the likelihood of the answer behind it."""
    llm = generator.llm
    requests: list[Request] = []
    for m in mismatches:
        before = [*m.prompt.tokens, *m.tokens]
        tokens = [*before, *m.exact.tokens[m.at + 1 : m.at + 1 + SPAN]]
        output = llm.new_output(tokens, max_tokens=1)
        kept = {"n_prompt_logprobs": 0, "prompt_from": len(before) - 1}
        requests.append(llm.new_request(tokens, output, sampling={"temp": 0.0}, **kept))
    generator.run_all(requests)
    out = {}
    for m, request in zip(mismatches, requests):
        after = [logprob for logprob, _ in request.prompt_logprobs]
        before_it = [record.logprob for record in m.exact.records[m.at + 1 :]]
        out[id(m)] = sum(a - b for a, b in zip(after, before_it)) >= -DROP
    return out


# ---- Learning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a gate does on prompts that it was not fitted to."""

    name: str
    least: float
    """Its threshold."""
    accepted: float
    """Share of mismatches."""
    lost: float
    """The loss, for each answer."""


@dataclass(frozen=True)
class Learned:
    """The result."""

    judge: Judge
    held: Held
    """The judge."""
    others: tuple[Held, ...]
    """Gates that need no training, each with the threshold that accepts most within the loss."""
    n_prompts: int
    n_mismatches: int
    n_harmful: int


def fit(x: Floats, y: Floats, counts: Floats, penalty: float = 1.0) -> Floats:
    """Logistic regression by Newton's method: the weights of the columns, and the bias.

    Args:
        x: [n, m]; columns are standardised for the penalty, which is penalty / 2 times the squares of the weights.
        y: [n], 1 or 0.
        counts: [n], how often each row counts.
    """
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, np.inf)  # a column that says nothing gets no weight
    a = np.column_stack([(x - mean) / scale, np.ones(len(x))])
    ridge = np.diag([*np.full(x.shape[1], penalty), 1e-6])
    b = np.zeros(a.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(a @ b, -500, 500)))
        step = np.linalg.solve((a.T * (counts * p * (1 - p))) @ a + ridge, a.T @ (counts * (p - y)) + ridge @ b)
        b -= step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            break
    weights = b[:-1] / scale
    return np.append(weights, b[-1] - weights @ mean)


def hold(name: str, scores: Floats, harmful: Floats, counts: Floats, n_prompts: int, most_lost: float) -> Held | None:
    """The lowest threshold of these scores within the loss; None if there is none."""
    order = np.argsort(-scores, kind="stable")
    scores, accepted, lost = scores[order], counts[order].cumsum(), (counts * harmful)[order].cumsum() / n_prompts
    is_last = np.append(scores[1:] < scores[:-1], True)  # what scores alike is accepted alike
    possible = np.flatnonzero(is_last & (lost <= most_lost + 1e-12) & np.isfinite(scores))
    if not possible.size:
        return None
    i = possible[-1]
    return Held(name, float(scores[i]), float(accepted[i] / counts.sum()), float(lost[i]))


def learn(mined: Sequence[dict[str, Any]], most_lost: float, name: str) -> Learned:
    """Fits a judge and compares it.

    Args:
        most_lost: The largest loss.
        name: Its file.

    Raises:
        ValueError: there is too little to learn from, no threshold keeps the loss, or a gate that needs no training
            accepts as much.
    """
    units = sorted({row["prompt"] for row in mined})
    if len(units) < MIN_PROMPTS:
        raise ValueError(
            f"{len(units)} prompts are too few to train on; give at least {MIN_PROMPTS}, better 50 to 200."
        )
    fold_of = dict(zip(np.random.default_rng(0).permutation(units).tolist(), np.arange(len(units)) % N_FOLDS))
    table = [
        [*row, one["mismatches"] / len(one["rows"]), fold_of[one["prompt"]]] for one in mined for row in one["rows"]
    ]
    data = np.array(table, dtype=np.float64).reshape(len(table), len(FEATURES) + 3)
    drafts = [FEATURES.index(feature) for feature in OF_DRAFT]
    if (has_row := data[:, drafts].any(axis=1)).any():
        data = data[has_row]  # of several drafters, those with distributions
    x, y, counts, folds = data[:, :-3], data[:, -3], data[:, -2], data[:, -1]
    n_harmful = int((y == 0).sum())
    if n_harmful in (0, len(y)):
        which = "harmless" if n_harmful == 0 else "harmful"
        raise ValueError(f"all {len(y)} mismatches are {which}, so there is nothing to learn; give more prompts.")
    scores = np.zeros(len(y))
    for fold in range(N_FOLDS):
        b = fit(x[folds != fold], y[folds != fold], counts[folds != fold])
        scores[folds == fold] = x[folds == fold] @ b[:-1] + b[-1]
    of = dict(zip(FEATURES, x.T))
    others = {"judge": scores, "margin": -of["margin"], "entropy": of["entropy"]}
    if has_row.any():  # arXiv 2601.04766
        others["kl (p(top 1) <= 0.9)"] = np.where(of["top"] <= math.log(0.9), -of["kl"], -np.inf)
    held, *rest = (hold(one, its, 1 - y, counts, len(mined), most_lost) for one, its in others.items())
    guards = tuple(replace(guard, least=abs(guard.least)) for guard in rest if guard)
    best = max(guards, key=lambda guard: guard.accepted, default=None)
    if held is None or (best and held.accepted <= best.accepted):
        than = f", and {best.name}:{best.least:.3g} {best.accepted:.0%}" if best else ""
        raise ValueError(
            f"with at most {most_lost:g} harmful tokens per answer, the judge accepts "
            f"{f'{held.accepted:.0%}' if held else 'none'} of {len(y)} mismatches of {len(units)} prompts{than}, so "
            f"nothing was written ({n_harmful} mismatches are harmful); mine more prompts, or raise --lost-share."
        )
    b = fit(x, y, counts)
    weights = tuple((feature, float(w)) for feature, w in zip(FEATURES, b) if w != 0.0)
    least = float(np.clip(1 / (1 + np.exp(-held.least)), 1e-6, 1 - 1e-6))
    judge = Judge(name, weights, float(b[-1]), least)
    return Learned(judge, replace(held, least=least), guards, len(units), len(y), n_harmful)
