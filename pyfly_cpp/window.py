"""The deferral window: what must happen after a deferred mismatch for it to stand."""

from __future__ import annotations

from dataclasses import dataclass

RULES = ("agree", "reconverge")
"""In the order of `pyfly_window_rule` of pyfly.h."""


@dataclass(frozen=True)
class Window:
    """Conditions on the `size` positions after a deferred mismatch. The decisions are made in `csrc/window.cpp`."""

    size: int = 6
    """W of the FLy paper, positions, >= 0. 0 lets every deferred mismatch stand at once."""

    rule: str = "agree"
    """`"agree"` (FLy paper, Eq. 8-9): the next W positions are all drafted and all match. `"reconverge"`: one drafted
    position among the next W matches. Agree suits long drafts (K > W), reconverge short ones (K <= W)."""

    tail: int | None = None
    """The last `tail` positions of a round are strict, >= 0. None: as many as the rule needs. The FLy reference code
    with `win_len` L is `Window(size=L - 1, tail=L)`."""

    across_rounds: bool | None = None
    """Whether an undecided mismatch survives its round as provisional: kept in the caches, withheld from the caller,
    taken back if its window breaks. None: False for agree, True for reconverge."""

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 0 <= self.size <= 2**31 - 1:
            raise ValueError(f"the window's size must be an integer >= 0, not {self.size!r}.")
        if self.rule not in RULES:
            raise ValueError(f"the window's rule must be 'agree' or 'reconverge', not {self.rule!r}.")
        if self.tail is not None and (
            isinstance(self.tail, bool) or not isinstance(self.tail, int) or not 0 <= self.tail <= 2**31 - 1
        ):
            raise ValueError(f"the window's tail must be an integer >= 0 or None, not {self.tail!r}.")
        if self.across_rounds not in (None, True, False):
            raise ValueError(f"across_rounds must be True, False or None, not {self.across_rounds!r}.")

    @property
    def outlives_round(self) -> bool:
        """`across_rounds` with its default filled in."""
        return self.rule == "reconverge" if self.across_rounds is None else self.across_rounds

    def config(self) -> tuple[int, int, int, bool]:
        """(size, rule, tail, across_rounds): `pyfly_window_config` of pyfly.h."""
        return self.size, RULES.index(self.rule), -1 if self.tail is None else self.tail, self.outlives_round

    def __str__(self) -> str:
        text = f"{self.rule}:{self.size}"
        if self.tail is not None:
            text += f" tail {self.tail}"
        return text + (" across rounds" if self.outlives_round else "")


def require_window(window: object) -> Window:
    """Returns `window` if it is one; raises ValueError otherwise."""
    if not isinstance(window, Window):
        raise ValueError(f"window must be Window(...), not {window!r}.")
    return window
