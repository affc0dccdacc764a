"""llama.cpp's log, as llama-cpp-python prints it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_logger = logging.getLogger("llama-cpp-python")


@contextlib.contextmanager
def silenced(*, unless_verbose: bool = False) -> Iterator[None]:
    """Nothing of llama.cpp's log is printed inside; `unless_verbose`: if no model was loaded with verbose=True.
    Until a first model is loaded, llama-cpp-python prints everything."""
    level = _logger.level
    if not (unless_verbose and level == logging.DEBUG):
        _logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        _logger.setLevel(level)
