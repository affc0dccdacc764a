"""Fuzzy speculative decoding: the gate compares the draft's distribution with the target's."""

from __future__ import annotations

from dataclasses import dataclass

from pyfly_cpp import _native
from pyfly_cpp.decoding.gates.at_once import AtOnce
from pyfly_cpp.decoding.gates.gate import GateNode, written
from pyfly_cpp.ranges import require_integer, require_number

_NODES = {kind[len("fuzzy_") :].replace("_", "-"): kind for kind in _native.GATE_KINDS if kind.startswith("fuzzy_")}

KINDS = tuple(_NODES)
"""Divergences, in the order of pyfly.h."""


@dataclass(frozen=True)
class Fuzzy(AtOnce):
    """Defers if a divergence of the two rows is at most a threshold, for any token.

    With p the target's distribution, q the draft's, m = (p + q) / 2, in nats: `"kl"` KL(q || p), `"kl-target"`
    KL(p || q), `"js"` the Jensen-Shannon divergence (KL(p || m) + KL(q || m)) / 2, `"js-code"` with the arguments
    swapped, (KL(m || p) + KL(m || q)) / 2, which the reference code calls js, and `"tv"` sum |p - q| / 2.

    Source: Holsman et al. 2025, "Fuzzy Speculative Decoding" (arXiv 2502.20704), section 3 and appendix C, and its code
    (maxholsman/fsd). Here a match is always accepted, and a protected token never loosely. The target's row is that
    after grammar and biases: under a grammar `"kl"` and `"js-code"` are nearly always infinite, and for a head that
    proposes a part of the vocabulary `"kl-target"` and `"js-code"`, unless `top` tokens are all of that part.

    Needs a drafter with distributions: a draft model or a head.

    With `residual=True`, rFSD (written `rfsd-js:0.1`): if the divergence is above the threshold, speculative
    sampling (`Stochastic`) decides, and a draft that fails its test is replaced by a draw from norm(max(p - q, 0)). At
    threshold 0 every token has the target's own distribution. The paper's FSD rejects there without a test and draws
    from p. The divergence is that of the rows before temperature and truncation, as without the residual, so that a
    threshold means the same; drafts are drawn with the request's temperature and truncation. At temperature 0 it is
    `Fuzzy` as above.
    """

    kind: str = "js"
    """One of `KINDS`."""

    threshold: float = 0.1
    """>= 0."""

    top: int | None = None
    """Compare only so many of the target's most probable tokens, and the rest as one; None: all."""

    residual: bool = False
    """rFSD. It takes guards, and neither a window nor other gates."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {self.kind!r}.")
        object.__setattr__(self, "threshold", require_number("threshold", self.threshold))
        if self.top is not None:
            require_integer("top", self.top, 1, 2**31 - 1)
        if not isinstance(self.residual, bool):
            raise ValueError(f"residual must be True or False, not {self.residual!r}.")

    def nodes(self) -> tuple[GateNode, ...]:
        node = GateNode(_NODES[self.kind], self.top or 0, self.threshold)
        return (node, GateNode("stochastic"), GateNode("any", 2)) if self.residual else (node,)

    def __str__(self) -> str:
        word = "rfsd" if self.residual else "fuzzy"
        return f"{word}-{self.kind}:{written(self.threshold)}" + ("" if self.top is None else f":{self.top}")
