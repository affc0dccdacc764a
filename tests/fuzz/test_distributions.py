"""Random models, samplers and drafters: what speculative sampling commits has the target's own distribution. A failure
is a p-value under one in a million."""

from __future__ import annotations

import random

import pytest
from sampling_oracle import DRAFTERS, Script, sample

from pyfly_cpp import Fuzzy, Stochastic
from pyfly_cpp.decoding.gates.fuzzy import KINDS

pytestmark = pytest.mark.fuzz


def test_three_tokens_have_the_targets_distribution(cases):
    for seed in cases(2):
        rng = random.Random(seed)
        gate = rng.choice([Stochastic(), Fuzzy(rng.choice(KINDS), 0.0, residual=True)])
        how = {
            "temperature": rng.choice([0.5, 0.8, 1.0, 1.5]),
            "top_k": rng.choice([None, 2, 4]),
            "top_p": rng.choice([None, 0.5, 0.9]),
            "min_p": rng.choice([None, 0.05, 0.3]),
            "penalty": rng.choice([None, 1.3]),
            "banned": rng.choice([None, [1], [0, 5]]),
        }
        which = rng.choice(DRAFTERS[:2] if isinstance(gate, Fuzzy) else DRAFTERS)
        models = [Script(rng.randrange(2**31), rng.choice([0.5, 1.5, 3.0])) for _ in range(2)]
        fit = sample(*models, gate, how, which, 1000, rng.choice([1, 2, 3, 6]), rng.randrange(2**31))
        print(f"{seed}: {gate}, {how}, {which}: {fit}")
        fit.require(1e-6)
