"""Named arrays of one step in one int32 buffer, so that they reach the device in a single copy.

It knows nothing of what they mean.
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

# PERF: of 16 bytes. Where an array begins decides which kernel Triton takes, and compiles if it has
# none: every step's arrays begin alike, so that none is compiled while requests wait.
ALIGNED_WORDS = 4


class HostArrays:
    """Filled on the host, then written into a slot."""

    __slots__ = ("_narrow", "_wide")

    def __init__(self) -> None:
        self._wide: dict[str, ArrayI32] = {}
        self._narrow: dict[str, ArrayI32] = {}

    def add(self, name: str, values: ArrayI32) -> None:
        self._narrow[name] = values

    def add_wide(self, name: str, values: ArrayI64 | ArrayF64) -> None:
        self._wide[name] = values.reshape(-1).view(np.int32)

    @property
    def num_words(self) -> int:
        """With the gaps between them."""
        return sum(map(_room, (self._wide | self._narrow).values()))

    def write(self, words: ArrayI32) -> dict[str, slice]:
        """Copies all sections into `words`; says where each is."""
        places: dict[str, slice] = {}
        start = 0
        for name, values in (self._wide | self._narrow).items():
            places[name] = slice(start, start + len(values))
            words[places[name]] = values
            start += _room(values)
        return places


class DeviceArrays:
    """The same on the device: `words` int32 [n], which are made int64 where one is first asked."""

    __slots__ = ("_longs", "_places", "words")

    def __init__(self, words: Tensor, places: Mapping[str, slice]) -> None:
        self.words = words
        self._places = places
        self._longs: Tensor | None = None

    def ints(self, name: str) -> Tensor:
        """int64 [n], a view."""
        if self._longs is None:
            self._longs = self.words.to(torch.int64)
        return self._longs[self._places[name]]

    def narrow_ints(self, name: str) -> Tensor:
        return self.words[self._places[name]]

    def wide_ints(self, name: str) -> Tensor:
        return self.narrow_ints(name).view(torch.int64)

    def floats(self, name: str) -> Tensor:
        return self.narrow_ints(name).view(torch.float64)


def _room(values: ArrayI32) -> int:
    return -(-len(values) // ALIGNED_WORDS) * ALIGNED_WORDS
