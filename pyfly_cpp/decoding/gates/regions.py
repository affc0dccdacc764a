"""A gate that depends on the region being written, and the regions of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyfly_cpp import _native
from pyfly_cpp.decoding.gates.fly import Exact
from pyfly_cpp.decoding.gates.gate import REGIONS, Gate, GateNode
from pyfly_cpp.decoding.windows import Window


@dataclass(frozen=True)
class Regions(Gate):
    """Uses the gate named for the region being written, and defers nothing in other regions.

    `Regions(prose=Margin(0.3), think=Relaxed())` is loose in prose and thoughts alone. `csrc/regions.h` defines each
    region. If several apply, the first in this order counts: structured, think, code, numbers, prose. The text is
    followed from the beginning of the prompt on, so an answer whose prompt opens a think block begins in it. A mismatch
    has the window of the gate that deferred it.
    """

    prose: Gate | None = None
    """Everything else."""
    code: Gate | None = None
    """Fenced blocks and code spans of Markdown. Code without a fence is prose."""
    numbers: Gate | None = None
    """Tokens of prose, drafted or the target's choice, with a digit, or with an operator behind one."""
    think: Gate | None = None
    """Think blocks with their contents."""
    structured: Gate | None = None
    """Tool calls, and answers under a grammar or JSON schema."""

    def __post_init__(self) -> None:
        if not any(self._named()):
            raise ValueError("Regions needs a gate for at least one region, as in regions(prose=margin:0.3).")
        for region, gate in zip(REGIONS, self._named()):
            if gate is not None and not isinstance(gate, Gate):
                raise ValueError(f"the region {region} needs a gate such as Margin(0.3), not {gate!r}.")
            if gate is not None and gate.draws_choices:
                raise ValueError(f"{gate} draws the choices of a whole answer; use it alone, not for a region.")
            if gate is not None and gate.is_guard:
                raise ValueError(
                    f"{gate} only restricts other gates; combine it with one, as in {region}=all(margin:0.3,{gate})."
                )
            object.__setattr__(self, region, gate or Exact())

    def _named(self) -> tuple[Gate | None, ...]:
        return tuple(getattr(self, region) for region in REGIONS)

    def in_region(self, region: str) -> Gate:
        gate: Gate = getattr(self, region)
        return gate.in_region(region)

    def nodes(self) -> tuple[GateNode, ...]:
        by_gate: dict[Gate, int] = {}
        for i, region in enumerate(REGIONS):
            gate = self.in_region(region)
            if not gate.is_lossless:
                by_gate[gate] = by_gate.get(gate, 0) | 1 << i
        nodes: list[GateNode] = []
        for gate, regions in by_gate.items():
            nodes += [GateNode("region", regions), *gate.nodes(), GateNode("all", 2)]
        return (*nodes, GateNode("any", len(by_gate))) if nodes else Exact().nodes()

    @property
    def window(self) -> Window:
        """The window with the fewest strict positions among its gates': if it lets nothing stand, nothing can. A
        mismatch itself has the window of its region."""
        gates = [self.in_region(region) for region in REGIONS]
        windows = [gate.window for gate in gates if not gate.is_lossless]
        return min(windows, key=lambda window: window.n_strict, default=Window())

    @property
    def is_lossless(self) -> bool:
        return all(self.in_region(region).is_lossless for region in REGIONS)

    def __str__(self) -> str:
        named = [f"{region}={gate}" for region, gate in zip(REGIONS, self._named()) if gate != Exact()]
        return f"regions({','.join(named or ['prose=exact'])})"


def regions_of(pieces: Sequence[str | bytes], control: Iterable[int] = ()) -> list[str]:
    """The region of each piece of a text, as `Regions` sees it: "prose", "code", "numbers", "think" or
    "structured".

    Args:
        pieces: The text in tokens, lines or other pieces; UTF-8 that may be cut anywhere.
        control: The places of pieces that are control tokens, such as the end of a message.
    """
    return [REGIONS[region] for region in _native.regions(pieces, frozenset(control))]
