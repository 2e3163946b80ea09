"""The free pages of one layer group.

Knows nothing of who holds a page or why. Written by kv_cache.py only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aserve.errors import BugError


class PagePool:
    """Pages 1..num_pages - 1; page 0 is padding and is never given out. The page freed last is
    taken first.
    """

    __slots__ = ("_free", "_is_free", "name", "num_pages")

    def __init__(self, name: str, num_pages: int) -> None:
        self.name = name
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = bytearray([0]) + bytearray(b"\x01") * (num_pages - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_pages(self) -> Iterable[int]:
        return iter(self._free)

    def take(self, count: int) -> list[int]:
        if not 0 <= count <= len(self._free):
            raise BugError(
                f"group {self.name!r}: {count} pages were asked for, but {len(self._free)} are free"
            )
        rest = len(self._free) - count
        taken = self._free[rest:]
        del self._free[rest:]
        taken.reverse()
        for page in taken:
            self._is_free[page] = 0
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 < page < self.num_pages:
                raise BugError(
                    f"group {self.name!r}: page {page} came back, "
                    f"but pages are 1..{self.num_pages - 1}"
                )
            if self._is_free[page]:
                raise BugError(
                    f"group {self.name!r}: page {page} came back, but it is free already"
                )
            self._is_free[page] = 1
            self._free.append(page)
