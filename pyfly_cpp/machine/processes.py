"""The process that an object's threads belong to."""

from __future__ import annotations

import os

from pyfly_cpp.errors import PyflyError

_has_computed = False
_is_fork_of_one_that_has = False


def note_computing() -> None:
    """Notes that this process computes, perhaps with several threads."""
    global _has_computed
    _has_computed = True


def require_own_threads() -> None:
    """Raises ValueError in a fork of a process that has computed: the threads of OpenMP are not in it, and who
    computes with several would wait for them for ever."""
    if _is_fork_of_one_that_has:
        raise ValueError(
            "this process is a fork of one that has used a model, and llama.cpp would wait for that one's threads; "
            "start it with multiprocessing's spawn, or load the model with n_threads=1 and n_threads_batch=1."
        )


def _forked() -> None:
    global _is_fork_of_one_that_has
    _is_fork_of_one_that_has = _has_computed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


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
                "start this process with multiprocessing's spawn, and load the model in it."
            )
