"""Random acceptance: the baseline that rules are measured against."""

from __future__ import annotations

from dataclasses import dataclass

from pyfly_cpp.decoding.gates.at_once import AtOnce
from pyfly_cpp.decoding.gates.gate import GateNode, written
from pyfly_cpp.ranges import require_integer, require_number


@dataclass(frozen=True)
class Random(AtOnce):
    """A baseline for measurements, not a rule to write with: defers with probability p, whatever the rows say. A rule
    that looks at them must keep more answers than this one does with as many loose tokens. `Random(1)` accepts whatever
    is drafted, as if the draft wrote alone. Protected, forbidden and as good as impossible tokens are still rejected.

    The draw follows from the seed, the answer so far and the drafted token: the same draft in the same place of the
    same answer has the same fate, in any batch and at any temperature, and a larger p accepts all that a smaller
    one does.
    """

    p: float = 0.5
    """A probability, in [0, 1]. 0 is exact."""

    seed: int = 0
    """>= 0, for draws that are independent of another seed's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", require_number("p", self.p, 1.0))
        require_integer("seed", self.seed, 0, 2**31 - 1)

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("random", self.seed, self.p),)

    def __str__(self) -> str:
        return f"random:{written(self.p)}" + (f":{self.seed}" if self.seed else "")
