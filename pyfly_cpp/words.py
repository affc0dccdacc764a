"""Numbers with their nouns."""

from __future__ import annotations


def counted(n: int, one: str, many: str = "") -> str:
    """`1 answer`, `3 answers`; `many` where an s is not enough."""
    return f"{n} {one if n == 1 else many or one + 's'}"
