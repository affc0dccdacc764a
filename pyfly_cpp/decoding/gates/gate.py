"""The common base of gates."""

from __future__ import annotations

from typing import NamedTuple

from pyfly_cpp import _native
from pyfly_cpp.decoding.windows import Window

REGIONS = tuple(_native.REGIONS)
"""Kinds of text, in the order of `pyfly_region` of pyfly.h."""


class GateNode(NamedTuple):
    """One node of a gate in reverse Polish order (`pyfly_gate_node` of pyfly.h)."""

    kind: str
    """A word of `pyfly_gate_kind`."""
    n: int = 0
    threshold: float = 0.0
    second: float = 0.0


TWO_DRAWS = GateNode("stochastic", 2)
"""A gate that makes choices by two draws from the target's distribution, either of which a draft may match."""


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

    def in_region(self, region: str) -> Gate:
        """The gate while one of the `REGIONS` is written."""
        return self

    def windows(self, given: Window | None = None) -> tuple[Window, ...]:
        """The windows of a mismatch in each of the `REGIONS`: the one that was given, or its own."""
        gates = [self.in_region(region) for region in REGIONS]
        return tuple(given or (self if gate.is_lossless else gate).window for gate in gates)

    @property
    def is_lossless(self) -> bool:
        """Whether it never defers, by its kind."""
        return False

    @property
    def draws_choices(self) -> bool:
        """Whether the target's choices are not simply those of its sampler, for the whole answer."""
        return any(node.kind == "stochastic" for node in self.nodes())

    @property
    def draws(self) -> bool:
        """Whether drafts and the target's choices are drawn by speculative sampling, which decides without a window."""
        return False

    @property
    def compares_drafts(self) -> bool:
        """Whether it looks at the distributions that drafts come from."""
        return any(node.kind.startswith("fuzzy_") for node in self.nodes())

    @property
    def is_guard(self) -> bool:
        """Whether it only restricts other gates."""
        return False
