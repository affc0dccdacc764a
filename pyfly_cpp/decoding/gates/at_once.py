"""Gates without a window: deferred tokens stand immediately."""

from __future__ import annotations

from dataclasses import dataclass

from pyfly_cpp import _native
from pyfly_cpp.decoding.gates.gate import Gate, GateNode, written
from pyfly_cpp.decoding.windows import Window
from pyfly_cpp.ranges import require_integer, require_number


class AtOnce(Gate):
    """A gate whose authors use it without a window: deferred tokens stand immediately."""

    @property
    def window(self) -> Window:
        return Window(0)


@dataclass(frozen=True)
class Typical(AtOnce):
    """Typical acceptance: defers if p(draft) > min(epsilon, delta exp(-H)), H being the entropy of the whole row.

    Source: Medusa (arXiv 2401.10774), section 2.3.1. There p has the temperature of the request; here it has none, and
    the draft's first token is not accepted unseen.
    """

    epsilon: float = 0.09
    """Probability that is always enough, in [0, 1]."""

    delta: float = 0.3
    """Share of exp(-H), in [0, 1]. 0 lets every token pass that is not forbidden."""

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            object.__setattr__(self, name, require_number(name, getattr(self, name), 1.0))

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("typical", 0, self.epsilon, self.delta),)

    def __str__(self) -> str:
        return f"typical:{written(self.epsilon)}:{written(self.delta)}"


@dataclass(frozen=True)
class Relaxed(AtOnce):
    """Relaxed acceptance: defers one of the target's k most probable tokens if p(top 1) - p(draft) <= delta.

    Source: TensorRT-LLM (`relaxed_topk`, `relaxed_delta`), which does so inside think blocks only.
    """

    k: int = 10
    """Tokens, 1..32."""

    delta: float = 0.6
    """A difference of probabilities, in [0, 1]."""

    def __post_init__(self) -> None:
        require_integer("k", self.k, 1, _native.MAX_TOP)
        object.__setattr__(self, "delta", require_number("delta", self.delta, 1.0))

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("relaxed", self.k, self.delta),)

    def __str__(self) -> str:
        return f"relaxed:{self.k}:{written(self.delta)}"
