"""Several gates as one."""

from __future__ import annotations

from dataclasses import dataclass

from pyfly_cpp.decoding.gates.gate import Gate, GateNode
from pyfly_cpp.decoding.windows import Window


@dataclass(frozen=True, init=False, repr=False)
class _Combined(Gate):
    """Several gates as one."""

    gates: tuple[Gate, ...]

    def __init__(self, *gates: Gate) -> None:
        if not gates:
            raise ValueError(f"{type(self).__name__} needs at least one gate.")
        for gate in gates:
            if not isinstance(gate, Gate):
                raise ValueError(f"{type(self).__name__} combines gates such as Margin(0.3), not {gate!r}.")
            if gate.draws and gate.is_lossless:
                raise ValueError(f"{gate} accepts nothing loosely, so there is nothing to combine; use it alone.")
        object.__setattr__(self, "gates", gates)

    def _combined(self, kind: str) -> tuple[GateNode, ...]:
        operands = [node for gate in self.gates for node in gate.nodes()]
        return (*operands, GateNode(kind, len(self.gates), 0.0))

    def _windows(self) -> list[Window]:
        """Those of the gates that may defer, the one that asks for least first."""
        windows = [gate.window for gate in self.gates if not gate.is_lossless and not gate.is_guard]
        return sorted(windows, key=lambda window: window.n_strict) or [Window()]

    def _join(self, word: str) -> str:
        return f"{word}({','.join(str(gate) for gate in self.gates)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(gate) for gate in self.gates)})"


@dataclass(frozen=True, init=False, repr=False)
class AllOf(_Combined):
    """Defers when every one of its gates does: `AllOf(Entropy(0.3), Margin(0.5))`."""

    def __init__(self, *gates: Gate) -> None:
        super().__init__(*gates)
        for i, gate in enumerate(gates):
            if gate.draws and not all(other.is_guard for other in gates[:i] + gates[i + 1 :]):
                raise ValueError(
                    f"{gate} decides by random draws, which other gates do not; in an all(...) it takes guards only, "
                    f"such as all({gate},exact-first:8)."
                )

    def nodes(self) -> tuple[GateNode, ...]:
        return self._combined("all")

    @property
    def window(self) -> Window:
        """The gates' window with the fewest strict positions. That gate also defers all that is deferred here."""
        return self._windows()[0]

    @property
    def is_lossless(self) -> bool:
        return any(gate.is_lossless for gate in self.gates)

    @property
    def is_guard(self) -> bool:
        return all(gate.is_guard for gate in self.gates)

    def __str__(self) -> str:
        return self._join("all")


@dataclass(frozen=True, init=False, repr=False)
class AnyOf(_Combined):
    """Defers when at least one of its gates does: `AnyOf(Entropy(0.6), Margin(0.2))`."""

    def __init__(self, *gates: Gate) -> None:
        super().__init__(*gates)
        for gate in gates:
            if gate.is_guard:
                raise ValueError(f"{gate} only restricts other gates; write it in an all(...), not in an any(...).")
            if gate.draws:
                raise ValueError(f"{gate} accepts more than other gates judge; use it alone, not in an any(...).")

    def nodes(self) -> tuple[GateNode, ...]:
        return self._combined("any")

    @property
    def window(self) -> Window:
        """The window with the most strict positions among its gates': any of them may have deferred alone."""
        return self._windows()[-1]

    @property
    def is_lossless(self) -> bool:
        return all(gate.is_lossless for gate in self.gates)

    def __str__(self) -> str:
        return self._join("any")
