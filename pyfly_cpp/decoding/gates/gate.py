"""The common base of gates."""

from __future__ import annotations

from typing import NamedTuple

from pyfly_cpp.decoding.windows import Window


class GateNode(NamedTuple):
    """One node of a gate in reverse Polish order (`pyfly_gate_node` of pyfly.h)."""

    kind: str
    """A word of `pyfly_gate_kind`."""
    n: int = 0
    threshold: float = 0.0
    second: float = 0.0


def written(x: float) -> str:
    """The shortest form that reads back as x."""
    return repr(x)[:-2] if repr(x).endswith(".0") else repr(x)


class Gate:
    """The base of all gates."""

    def nodes(self) -> tuple[GateNode, ...]:
        """The gate in reverse Polish order."""
        raise NotImplementedError

    @property
    def window(self) -> Window:
        """The gate's own window, the default for mismatches that it defers."""
        return Window()

    @property
    def is_lossless(self) -> bool:
        """Whether it never defers, by its kind."""
        return False

    @property
    def draws(self) -> bool:
        """Whether drafts and the target's choices are drawn by speculative sampling, which decides without a window."""
        return any(node.kind == "stochastic" for node in self.nodes())

    @property
    def compares_drafts(self) -> bool:
        """Whether it looks at the distributions that drafts come from."""
        return any(node.kind.startswith("fuzzy_") for node in self.nodes())

    @property
    def is_guard(self) -> bool:
        """Whether it only restricts other gates."""
        return False
