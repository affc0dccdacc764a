"""The process that an object's threads belong to."""

from __future__ import annotations

import os

from pyfly_cpp.errors import PyflyError


class Process:
    """The process that made an object with threads, or one on a GPU. A fork has the object and none of its threads,
    and whoever waited for one of them would wait for ever; what it asked of the GPU would end it."""

    def __init__(self, owner: str) -> None:
        """`owner`: the name of the object's class, for messages."""
        self._owner = owner
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def require_current(self) -> None:
        """Raises PyflyError in another process."""
        if not self.is_current:
            raise PyflyError(
                f"this {self._owner} was loaded by another process, whose threads and GPU are not in this fork of it; "
                "load the model in this process; with a GPU it must not be a fork (multiprocessing: spawn)."
            )
