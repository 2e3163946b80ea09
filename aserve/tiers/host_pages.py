"""Pages of KV in host memory. KvTiers alone writes it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from aserve.tiers.page_layout import ArrayU8


class HostPages:
    """A fixed number of places, each for one page. All methods but `read` and `write` are called on
    the event loop's thread.

    A page that is not being read gives way when it is the least recently used one. A place that was
    taken belongs to the caller until `enter` or `give_back`.
    """

    __slots__ = ("_free", "_num_fresh", "_pins", "_places", "_values")

    def __init__(self, max_pages: int, *, page_bytes: int) -> None:
        # NOTE: memory is not touched, and so not taken from the machine, before it is needed.
        self._values: ArrayU8 = np.empty((max_pages, page_bytes), np.uint8)
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[bytes] = Counter()  # how often a page is being read
        self._free: list[int] = []
        self._num_fresh = max_pages  # places that were never used, the last ones

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def take(self) -> tuple[int | None, bytes | None]:
        """Returns a place, and the key of the page that had to leave it, if one had. There is no
        place while all pages are being read or written.
        """
        if self._free:
            return self._free.pop(), None
        if self._num_fresh:
            self._num_fresh -= 1
            return self._num_fresh, None
        key = next((key for key in self._places if not self._pins[key]), None)
        return (None, None) if key is None else (self._places.pop(key), key)

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def enter(self, key: bytes, place: int) -> None:
        """Makes a written page findable, as the most recently used one."""
        if key in self._places:
            self.give_back(place)
        else:
            self._places[key] = place

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the places of the first keys, as far as all of them are here. Their pages stay
        until `unpin`.
        """
        places: list[int] = []
        for key in keys:
            if key not in self._places:
                break
            places.append(self._places[key])
        for key in reversed(keys[: len(places)]):  # a page goes before those in front of it
            self._pins[key] += 1
            self._places.move_to_end(key)
        return places

    def unpin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def read(self, places: Sequence[int]) -> ArrayU8:
        """Returns copies, uint8 [pages, page_bytes]."""
        pages: ArrayU8 = self._values[np.asarray(places, np.int64)]
        return pages

    def write(self, places: Sequence[int], pages: ArrayU8) -> None:
        self._values[np.asarray(places, np.int64)] = pages
