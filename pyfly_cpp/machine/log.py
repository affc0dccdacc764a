"""The logs of libraries: llama.cpp's, as llama-cpp-python prints it, and others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

LLAMA_CPP = "llama-cpp-python"
"""The logger of llama.cpp's lines."""


@contextlib.contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """A block in which a logger of `logging` has this level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def silenced(*, unless_verbose: bool = False) -> contextlib.AbstractContextManager[None]:
    """A block in which llama.cpp's log is not printed; with `unless_verbose` only if no model was loaded with
    verbose=True. Until a first model is loaded, llama-cpp-python prints everything."""
    is_verbose = logging.getLogger(LLAMA_CPP).level == logging.DEBUG
    return at_level(LLAMA_CPP, logging.DEBUG if unless_verbose and is_verbose else logging.CRITICAL + 1)
