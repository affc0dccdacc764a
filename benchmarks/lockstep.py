"""Turns that several ways to decode take, so that what else the machine does slows all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decodes(Protocol):
    """What takes turns."""

    def turn(self, seconds: float) -> bool:
        """Decodes for about so long. Returns whether there is more to do."""


def take_turns(ways: Sequence[Decodes], seconds: float) -> None:
    """All take turns until none has more to do; who begins changes."""
    running = list(ways)
    while running:
        running = [way for way in running if way.turn(seconds)]
        running = [*running[1:], *running[:1]]
