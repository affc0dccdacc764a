"""Speculative sampling: the target's choices depend on the drafts, and keep the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass

from pyfly_cpp.decoding.gates.at_once import AtOnce
from pyfly_cpp.decoding.gates.gate import GateNode


@dataclass(frozen=True)
class Stochastic(AtOnce):
    """Speculative sampling. Lossless at any temperature, as `Exact()` is, but the answer of a seed depends on the
    drafts. It accepted about as many of them (docs/answers.md).

    A draft x is drawn from the drafter's distribution q and accepted with probability min(1, p(x) / q(x)), p being the
    target's distribution after the whole sampler chain (processors, biases, penalties, grammar, truncation,
    temperature); a rejected draft is replaced by a draw from norm(max(p - q, 0)). So every token has the
    target's own distribution. Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1; Chen et al. 2023
    (arXiv 2302.01318), algorithm 2.

    Draft models and heads draw from their row, truncated and scaled as the request truncates and scales the target's,
    without its penalties, biases and grammar. Proposals of prompt lookup or a callable are accepted with probability
    p(x): q has everything on it. At temperature 0 this is `Exact()`. Random numbers follow from the request's seed; the
    same seed gives the same text if the same tokens are drafted, which neither the governor promises nor prompt lookup,
    whose drafts may come from earlier answers (`PromptLookup.memory`).

    It decides immediately, so it takes no window; it accepts nothing loosely, so there is nothing to combine it with.
    Mirostat, which learns from its own draws, is rejected.
    """

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("stochastic"),)

    @property
    def is_lossless(self) -> bool:
        return True

    def __str__(self) -> str:
        return "stochastic"
