"""Named arrays packed into one int32 buffer, so that they reach the device in a single copy.

`HostArrays` is filled on the host and written into a pinned slot; `DeviceArrays` reads the copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.messages.base import ArrayI32

ArrayI64 = npt.NDArray[np.int64]
ArrayF64 = npt.NDArray[np.float64]

# PERF: every array begins at a multiple of 16 bytes. Triton specialises kernels on the alignment of
# their arguments, so a step whose arrays began elsewhere would compile while requests wait.
ALIGNED_WORDS = 4


class HostArrays:
    """Arrays of one step on the host, by name."""

    __slots__ = ("_narrow", "_wide")

    def __init__(self) -> None:
        self._wide: dict[str, ArrayI32] = {}
        self._narrow: dict[str, ArrayI32] = {}

    def add(self, name: str, values: ArrayI32) -> None:
        self._narrow[name] = values

    def add_wide(self, name: str, values: ArrayI64 | ArrayF64) -> None:
        """Adds 64-bit values as pairs of words."""
        self._wide[name] = values.reshape(-1).view(np.int32)

    @property
    def num_words(self) -> int:
        """Words of the packed buffer, alignment included."""
        return sum(map(_aligned_len, (self._wide | self._narrow).values()))

    def write(self, words: ArrayI32) -> dict[str, slice]:
        """Copies all arrays into `words` and returns the slice of each."""
        slices: dict[str, slice] = {}
        start = 0
        for name, values in (self._wide | self._narrow).items():
            slices[name] = slice(start, start + len(values))
            words[slices[name]] = values
            start += _aligned_len(values)
        return slices


class DeviceArrays:
    """The packed arrays on the device. `words`: int32 [n]. int64 views come from one conversion of
    all words, made when the first is asked for."""

    __slots__ = ("_longs", "_slices", "words")

    def __init__(self, words: Tensor, slices: Mapping[str, slice]) -> None:
        self.words = words
        self._slices = slices
        self._longs: Tensor | None = None

    def ints(self, name: str) -> Tensor:
        """int64 [n], a view of the converted words."""
        if self._longs is None:
            self._longs = self.words.to(torch.int64)
        return self._longs[self._slices[name]]

    def narrow_ints(self, name: str) -> Tensor:
        """int32 [n], a view."""
        return self.words[self._slices[name]]

    def wide_ints(self, name: str) -> Tensor:
        """int64 [n / 2], a view of an array that was added with `add_wide`."""
        return self.narrow_ints(name).view(torch.int64)

    def floats(self, name: str) -> Tensor:
        """float64 [n / 2], a view of an array that was added with `add_wide`."""
        return self.narrow_ints(name).view(torch.float64)


def _aligned_len(values: ArrayI32) -> int:
    return -(-len(values) // ALIGNED_WORDS) * ALIGNED_WORDS
