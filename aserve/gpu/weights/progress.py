"""How whoever waits for a model is told how far it is loaded.

It knows no model and no checkpoint. The count is written by who loads, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

OnProgress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all


def ignore_progress(_done_bytes: int, _total_bytes: int) -> None:
    pass


class LoadProgress:
    """Weights are counted as bytes of `dtype`, the model's, as the total is."""

    __slots__ = ("_dtype", "_num_done", "_on_progress", "_total_bytes")

    def __init__(
        self, total_bytes: int, *, dtype: torch.dtype, on_progress: OnProgress = ignore_progress
    ) -> None:
        self._total_bytes = total_bytes
        self._dtype = dtype
        self._on_progress = on_progress
        self._num_done = 0

    def advance(self, num_weights: int) -> None:
        self._num_done += num_weights
        self._on_progress(self._num_done * self._dtype.itemsize, self._total_bytes)
