"""Ridge regression over more rows than memory holds."""

from __future__ import annotations

import torch
from torch import Tensor

STRENGTH = 0.02
"""Size of the ridge, as a share of the mean square of an input."""


class Ridge:
    """The matrix [n_out, n_in] that maps rows to rows with the least squared error and small entries."""

    def __init__(self) -> None:
        self._square: Tensor | None = None
        self._cross: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows x [row, n_in] that are to become y [row, n_out]."""
        if self._square is None or self._cross is None:
            self._square, self._cross = x.T @ x, x.T @ y
        else:
            self._square.addmm_(x.T, x)
            self._cross.addmm_(x.T, y)

    def solve(self) -> Tensor:
        """The matrix, of at least one row."""
        assert self._square is not None and self._cross is not None
        square = self._square.clone()
        square.diagonal().add_(STRENGTH * square.diagonal().mean())
        return torch.linalg.solve(square, self._cross).T
