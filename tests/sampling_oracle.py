"""Speculative sampling again, on dense NumPy rows and with the same random numbers, and how
observed tokens are held against a distribution."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from llama_cpp._internals import LlamaSampler
from one_request import Engine
from scipy import stats

from pyfly_cpp import Window
from pyfly_cpp._native import CallbackDrafter, RowDrafter, ScriptedTarget

MASK = 2**64 - 1
N_VOCAB = 6
PROMPT = [2, 3]
DRAFTERS = ("drawn", "wrong", "given")
"""Drafts drawn from rows, the same where the rows like a token far too much, and tokens without rows."""


class Random:
    """csrc/random.h. `closest`: how close a comparison with one of its numbers came to a tie."""

    def __init__(self, seed):
        self.state, self.closest = self._mix(seed), 1.0

    @staticmethod
    def _mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def uniform(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return (self._mix(self.state) >> 11) * 2.0**-53

    def is_under(self, probability):
        u = self.uniform()
        self.closest = min(self.closest, abs(u - probability))
        return u < probability

    def draw(self, weights):
        borders = np.cumsum(weights) / np.sum(weights)
        u = self.uniform()
        self.closest = min(self.closest, np.abs(borders[:-1] - u).min(initial=1.0))
        return int(np.argmax(borders > u))


def softmax(row):
    row = np.asarray(row, dtype=np.float64)
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def one_hot(token, n_vocab):
    return np.eye(n_vocab)[token]


def choose_beside(p, q, drafted, random):
    if random.is_under(min(1.0, p[drafted] / q[drafted])):
        return drafted
    return random.draw(np.maximum(p - q, 0))


def tokens_of_a_step(p_of, q_of, k, n_vocab):
    """The distribution of the first k + 1 tokens that a step of k drafts begins: exactly, over all drafts. p_of, q_of:
    from the tokens before to a distribution; what a step leaves open is drawn from p_of."""
    out = {}

    def add(tokens, mass):
        if len(tokens) == k + 1:
            out[tokens] = out.get(tokens, 0.0) + mass
        else:
            p = p_of(tokens)
            for token in range(n_vocab):
                add((*tokens, token), mass * p[token])

    for drafted in itertools.product(range(n_vocab), repeat=k):
        p, q = [p_of(drafted[:i]) for i in range(k)], [q_of(drafted[:i]) for i in range(k)]
        mass = np.prod([q[i][token] for i, token in enumerate(drafted)])
        if mass == 0.0:
            continue
        kept = np.cumprod([1.0, *(min(1.0, p[i][t] / q[i][t]) for i, t in enumerate(drafted))])
        for n, share in enumerate([*(kept[:-1] - kept[1:]), kept[-1]]):
            rest = np.maximum(p[n] - q[n], 0) if n < k else p_of(drafted)
            for token in range(n_vocab):
                if share * rest[token] > 0:
                    add((*drafted[:n], token), mass * share * rest[token] / rest.sum())
    return out


class Fit:
    """How well observed outcomes agree with their probabilities."""

    def __init__(self, observed, expected):
        """
        Args:
            observed: Outcomes.
            expected: The probability of each possible outcome.
        """
        counts, n = Counter(observed), len(observed)
        assert set(counts) <= {outcome for outcome, p in expected.items() if p > 0}, "impossible outcomes"
        cells = [(counts[outcome], n * p) for outcome, p in expected.items()]
        large = [cell for cell in cells if cell[1] >= 5]
        large.append((n - sum(c for c, _ in large), n - sum(e for _, e in large)))
        large = [(c, e) for c, e in large if e > 1e-9]
        chi_square = sum((c - e) ** 2 / e for c, e in large)
        self.p_value = float(stats.chi2.sf(chi_square, len(large) - 1)) if len(large) > 1 else 1.0
        self.total_variation = sum(abs(c - e) for c, e in cells) / 2 / n
        self.chance = sum(np.sqrt(e * (1 - e / n)) for _, e in cells) / 2 / n
        """The most total variation that so many true draws have in expectation."""
        self.n = n

    def __str__(self):
        return f"p = {self.p_value:.3f}, total variation {self.total_variation:.4f}, by chance under {self.chance:.4f}"

    def require(self, least=1e-3):
        """True draws fail with a probability of 2 * least at most (the total variation: McDiarmid's inequality); seeds
        are fixed, so that a test passes always or never."""
        assert self.p_value > least, str(self)
        assert self.total_variation < self.chance + np.sqrt(np.log(1 / least) / 2 / self.n), str(self)


class Script:
    """A model that is a function of the last few tokens."""

    def __init__(self, seed, scale=1.5, n_vocab=N_VOCAB, likes=None):
        self.seed, self.scale, self.n_vocab, self.likes, self.rows = seed, scale, n_vocab, likes, {}

    def row(self, history):
        key = tuple(int(t) for t in history[-3:])
        if key not in self.rows:
            rng = np.random.default_rng([self.seed, *key])
            row = rng.normal(scale=self.scale, size=self.n_vocab).astype(np.float32)
            if self.likes is not None:
                row[self.likes] += 6.0
            self.rows[key] = row
        return self.rows[key]


def sampler(seed, temperature=1.0, top_k=None, top_p=None, min_p=None, penalty=None, banned=None, dist=True):
    out = LlamaSampler()
    if banned is not None:
        out.add_logit_bias(N_VOCAB, dict.fromkeys(banned, -np.inf))
    if penalty is not None:
        out.add_penalties(N_VOCAB, 8, penalty, 0.0, 0.0)
    if top_k is not None:
        out.add_top_k(top_k)
    if top_p is not None:
        out.add_top_p(top_p, 1)
    if min_p is not None:
        out.add_min_p(min_p, 1)
    out.add_temp(temperature)
    out.add_dist(seed)
    return out


def cut(row, temperature=1.0, top_k=None, top_p=None, min_p=None, penalty=None, banned=None, history=()):
    """What `sampler` draws from."""
    row = np.array(row, dtype=np.float64)
    for token in banned or ():
        row[token] = -np.inf
    if penalty is not None:
        for token in set(list(history)[-8:]):
            row[token] *= penalty if row[token] <= 0 else 1 / penalty
    if top_k is not None:
        row[np.argsort(-row, kind="stable")[top_k:]] = -np.inf
    if top_p is not None:
        order = np.argsort(-row, kind="stable")
        n = int(np.argmax(np.cumsum(softmax(row)[order]) >= top_p)) + 1
        row[order[n:]] = -np.inf
    if min_p is not None:
        row[softmax(row) < min_p * softmax(row).max()] = -np.inf
    return softmax(row / temperature)


def sample(target, guess, gate, how, which, n, k=3, first_seed=0):
    """How the first three tokens of n answers fit their distribution. `how`: of the sampler; `which`: of DRAFTERS."""
    guess.likes = 1 if which == "wrong" else None  # now and then banned
    if which == "given":
        drafter = CallbackDrafter(lambda history: [int(guess.row(history).argmax()), 2, 3][: len(history) % 4])
    else:
        drafter = RowDrafter(guess.row, N_VOCAB)
    expected = {}
    for tokens in itertools.product(range(N_VOCAB), repeat=3):
        steps = ((token, [*PROMPT, *tokens[:i]]) for i, token in enumerate(tokens))
        expected[tokens] = np.prod([cut(target.row(h), history=h[2:], **how)[token] for token, h in steps])
    observed = []
    with ScriptedTarget(target.row, N_VOCAB) as scripted, Engine(scripted) as engine:
        engine.configure(gate, Window(0), [(drafter, k)])
        for seed in range(first_seed, first_seed + n):
            engine.begin(PROMPT, 0, sampler(seed, **how))
            out = []
            while len(out) < 3:
                engine.step()
                out += [token for _, token in engine.tokens()]
            observed.append(tuple(out[:3]))
        drafted = engine.counters()["drafted"]
    assert drafted > n
    return Fit(observed, expected)
