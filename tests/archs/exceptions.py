"""What architectures do not do, and why."""

from __future__ import annotations

from typing import NamedTuple


class Exception_(NamedTuple):
    pass


EXCEPTIONS = {}
