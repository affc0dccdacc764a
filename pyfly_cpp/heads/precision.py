"""The precision of learning."""

from __future__ import annotations

import functools
import time

import torch


def autocast(device: str) -> torch.autocast:
    """Matrix products in bfloat16 on a GPU ("cuda"), and on a processor ("cpu") where that is faster."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu" or _bfloat16_is_faster())


@functools.cache
def _bfloat16_is_faster() -> bool:
    """A Zen 3, which has no instructions for it, takes 340 times as long."""
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


def _seconds(kind: torch.dtype) -> float:
    x, matrix = torch.ones(128, 512, dtype=kind), torch.ones(512, 512, dtype=kind)
    x @ matrix
    begun = time.perf_counter()
    for _ in range(4):
        x @ matrix
    return time.perf_counter() - begun
