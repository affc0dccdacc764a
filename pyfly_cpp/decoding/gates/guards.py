"""Guards: they only restrict other gates, with which they stand in an `AllOf`."""

from __future__ import annotations

from dataclasses import dataclass

from pyfly_cpp.decoding.gates.gate import Gate, GateNode
from pyfly_cpp.ranges import require_integer


class Guard(Gate):
    """A gate that only restricts others, in an `AllOf`."""

    @property
    def is_guard(self) -> bool:
        return True


@dataclass(frozen=True)
class ExactFirst(Guard):
    """A guard: the first n tokens of an answer are the target's own choices, because everything after depends on them.
    Loose rules weaken refusals, and exact first tokens restore most of that (arXiv 2610.08678).
    `AllOf(Margin(0.3), ExactFirst(8))`."""

    n: int = 8
    """Tokens, >= 0."""

    def __post_init__(self) -> None:
        require_integer("n", self.n, 0, 2**31 - 1)

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("exact_first", self.n),)

    def __str__(self) -> str:
        return f"exact-first:{self.n}"


@dataclass(frozen=True)
class NoRepeat(Guard):
    """A guard: no loosely accepted token repeats an n-token sequence already in the answer, as in a loop that the
    target would leave. Repetition by the target itself is not prevented. `AllOf(Margin(0.3), NoRepeat(8))`."""

    n: int = 8
    """Tokens, >= 1."""

    def __post_init__(self) -> None:
        require_integer("n", self.n, 1, 2**31 - 1)

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("no_repeat", self.n),)

    def __str__(self) -> str:
        return f"no-repeat:{self.n}"
