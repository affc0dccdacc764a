"""Rows of a task from the hub, by the package `datasets` (extra `data`), if no file is given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from pyfly_cpp.machine import log
from pyfly_cpp.machine.rows import DataError, Row


class HubSplit(NamedTuple):
    """A split of a data set on the hub, as `datasets.load_dataset` names it."""

    path: str
    config: str | None
    split: str

    def __str__(self) -> str:
        return f"{self.path} ({', '.join(filter(None, (self.config, self.split)))})"


def load_rows(task: str, splits: Sequence[HubSplit], option: str) -> list[tuple[HubSplit, list[Row]]]:
    """All rows of some splits, as the hub has them.

    Args:
        task: Its name, for errors.
        option: The option that takes a file in their place.

    Raises:
        DataError: `datasets` is not installed, or a split cannot be loaded; the message names both remedies.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"the task {task} needs its rows; give a JSONL file with {option}, or install `datasets` (`pip install "
            f"'pyfly-cpp[data]'`) to load {splits[0].path} from the hub."
        ) from None
    loaded = []
    for split in splits:
        try:
            with log.at_level("huggingface_hub", logging.ERROR):  # without a line for each failed attempt
                rows = [dict(row) for row in datasets.load_dataset(split.path, split.config, split=split.split)]
        except Exception as error:  # of the network, the hub, the cache or the format: whatever comes out of there
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DataError(
                f"{split} cannot be loaded from the hub ({reason}); check the connection, or give a JSONL file with "
                f"{option}."
            ) from error
        loaded.append((split, rows))
    return loaded
