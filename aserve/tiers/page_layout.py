"""The bytes of pages as they are stored, and as the device gives and takes them.

The device gives the KV of several pages pool by pool: [layers, tokens, bytes of a slot]. A stored
page has the same for its own tokens alone, so that it can come back beside any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

ArrayU8: TypeAlias = npt.NDArray[np.uint8]


class PageLayout:
    """`pool_shapes` are those of KvAccess."""

    __slots__ = ("_pool_shapes", "page_bytes", "page_size")

    def __init__(self, pool_shapes: tuple[tuple[int, int], ...], *, page_size: int) -> None:
        self._pool_shapes = pool_shapes
        self.page_size = page_size
        self.page_bytes = sum(layers * page_size * slot for layers, slot in pool_shapes)

    def split(self, values: memoryview) -> ArrayU8:
        """Returns the pages of what the device gave, uint8 [pages, page_bytes]."""
        packed = np.frombuffer(values, np.uint8)
        pages = np.empty((len(packed) // self.page_bytes, self.page_bytes), np.uint8)
        for of_device, of_pages in self._views(packed, pages):
            of_pages[:] = of_device
        return pages

    def join(self, pages: ArrayU8) -> memoryview:
        """Returns pages, uint8 [pages, page_bytes], as the device takes them."""
        packed = np.empty(pages.size, np.uint8)
        for of_device, of_pages in self._views(packed, pages):
            of_device[:] = of_pages
        return packed.data

    def _views(self, packed: ArrayU8, pages: ArrayU8) -> Iterator[tuple[ArrayU8, ArrayU8]]:
        """Yields views [pages, layers, bytes of a page in a layer] of both forms, pool by pool."""
        num_pages, start, column = len(pages), 0, 0
        for num_layers, slot_bytes in self._pool_shapes:
            size = self.page_size * slot_bytes
            stop, next_column = start + num_layers * num_pages * size, column + num_layers * size
            of_device = packed[start:stop].reshape(num_layers, num_pages, size)
            of_pages = pages[:, column:next_column].reshape(num_pages, num_layers, size)
            yield of_device.transpose(1, 0, 2), of_pages
            start, column = stop, next_column
