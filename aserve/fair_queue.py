"""A queue with round robin over owners, so that a busy owner delays another one by one item only.

Only one thread at a time may use it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Serves owners by round robin, and the items of each owner in order of arrival."""

    __slots__ = ("_by_owner", "_last_served", "_num_items")

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[T]] = OrderedDict()  # the next owner comes first
        self._last_served = ""
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, owner: str, item: T) -> None:
        self._by_owner.setdefault(owner, deque()).append(item)
        self._num_items += 1

    def pop(self, may_take: Callable[[str], bool] = lambda owner: True) -> T | None:
        """Removes and returns the next item of the first owner for whom `may_take` is true. The
        owner that was served last comes after all others that wait.
        """
        if self._last_served in self._by_owner:
            self._by_owner.move_to_end(self._last_served)
        owner = next(filter(may_take, self._by_owner), None)
        if owner is None:
            return None
        self._last_served = owner
        item = self._by_owner[owner].popleft()
        self._num_items -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        return item

    def remove(self, owner: str, item: T) -> None:
        """Drops an item that waits; it may be gone already."""
        items = self._by_owner.get(owner)
        if items is None or item not in items:
            return
        items.remove(item)
        self._num_items -= 1
        if not items:
            del self._by_owner[owner]

    def drop(self, owner: str) -> None:
        """Drops all items of one owner."""
        self._num_items -= len(self._by_owner.pop(owner, ()))
