"""Exact matching, and the gates of FLy: the target is undecided, or finds the token almost as likely."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyfly_cpp import _native
from pyfly_cpp.decoding.gates.at_once import AtOnce
from pyfly_cpp.decoding.gates.gate import Gate, GateNode, written
from pyfly_cpp.ranges import require_number


@dataclass(frozen=True)
class Exact(Gate):
    """Never defers: only the target's own choices are kept. Lossless; standard speculative decoding."""

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("exact"),)

    @property
    def is_lossless(self) -> bool:
        return True

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Entropy(Gate):
    """Defers if the target is undecided.

    With `top=n`: H_n = -sum over the n most probable tokens of p ln p (not renormalised, nats) >= theta. Source: the
    FLy reference code (AMD-AGI/FLy, `fly/models/FLy.py`), with n = 3.

    With `top=None`: h = -sum p ln p / ln V >= theta, h in [0, 1]. Source: the FLy paper (arXiv 2511.22972), Eq. 5-6.

    The two differ: 0.3 nats of top-3 entropy is a loose gate; 0.3 of the normalised entropy asks for 3.5 nats at a
    vocabulary of 128k and rejects nearly everything. A theta for one does not carry over to the other.
    """

    theta: float = 0.3
    """Threshold: nats >= 0 with `top=n`, in [0, 1] with `top=None`. 0 defers everything."""

    top: int | None = 3
    """n of the top-n entropy, 1..32, or None for the normalised entropy of the whole row."""

    def __post_init__(self) -> None:
        if self.top is not None and (
            isinstance(self.top, bool) or not isinstance(self.top, int) or not 1 <= self.top <= _native.MAX_TOP
        ):
            raise ValueError(
                f"top must be an integer in 1..{_native.MAX_TOP}, or None for the normalised entropy, not {self.top!r}."
            )
        object.__setattr__(self, "theta", require_number("theta", self.theta, 1.0 if self.top is None else math.inf))

    def nodes(self) -> tuple[GateNode, ...]:
        if self.top is None:
            return (GateNode("entropy_normalized", 0, self.theta),)
        return (GateNode("entropy_top", self.top, self.theta),)

    def __str__(self) -> str:
        word = "entropy" + ("-normalized" if self.top is None else "")
        return f"{word}:{written(self.theta)}" + ("" if self.top in (None, 3) else f":{self.top}")


@dataclass(frozen=True)
class Margin(AtOnce):
    """Defers if the draft token is almost as likely as the most probable one: ln p(top 1) - ln p(draft) < tau.

    Source: the llama.cpp variant of FLy, which also accepts immediately if a draft is no longer than its window, as
    with its usual 4 tokens and a window of 6. tau = 0 is exact matching.
    """

    tau: float = 0.3
    """Threshold in nats, >= 0: 0.3 lets a token pass that has over 74% (exp -0.3) of the highest probability."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", require_number("tau", self.tau))

    def nodes(self) -> tuple[GateNode, ...]:
        return (GateNode("margin", 0, self.tau),)

    def __str__(self) -> str:
        return f"margin:{written(self.tau)}"
