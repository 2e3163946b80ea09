"""The pages that the tiers below the prefix cache have, as far as the scheduler knows, and those
that are handed down to them next.

With "write_through" a page is handed down when it enters the prefix tree, so that other engines
find it soon; with any policy it is handed down when it is evicted, unless the tiers have it
already. A noted page must be read on the device before the next step is launched, because that step
may write it: the scheduler sends SaveKv before each launch (scheduling/loads.py). So no page is
held for the tiers.

kv_cache.py and prefix_tree.py note pages; scheduling/loads.py does the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from aserve.cache.page_keys import split_keys
from aserve.messages.executor import TierPolicy
from aserve.messages.transfers import SaveKv


class StoredPages:
    """Pages are known by their keys. A page that lacks KV in some layer group is not stored."""

    __slots__ = ("_handed_down", "_keys", "_num_groups", "_pages", "_policy", "_stored", "is_off")

    def __init__(self, policy: TierPolicy, *, num_groups: int) -> None:
        self._policy, self.is_off = policy, policy == "off"
        self._num_groups = num_groups
        self._stored: set[bytes] = set()
        self._handed_down: set[bytes] = set()  # those that are stored, or on their way
        self._keys: list[bytes] = []
        self._pages: list[array[int]] = [array("i") for _ in range(num_groups)]

    def note_new(self, keys: Sequence[bytes], pages: Sequence[array[int]]) -> None:
        """Notes pages that have entered the tree, in the order of a sequence."""
        if self._policy == "write_through":
            for index in reversed(range(len(keys))):
                self._note(keys[index], [group_pages[index] for group_pages in pages])

    def note_evicted(self, key: bytes, pages: Sequence[int]) -> None:
        """Notes a page that is being evicted, with its page of each group."""
        if not self.is_off:
            self._note(key, pages)

    def take(self) -> SaveKv | None:
        """Returns the noted pages, and forgets them."""
        if not self._keys:
            return None
        keys, self._keys = self._keys, []
        pages, self._pages = self._pages, [array("i") for _ in range(self._num_groups)]
        return SaveKv(b"".join(keys), tuple(group_pages.tobytes() for group_pages in pages))

    def end_of(self, keys: Sequence[bytes], *, start: int, stop: int) -> int:
        """Returns the page index up to which the tiers have the pages from `start` on."""
        index = start
        while self._stored and index < stop and keys[index] in self._stored:
            index += 1
        return index

    def change(self, *, added: bytes, removed: bytes) -> None:
        new, gone = split_keys(added), split_keys(removed)
        self._stored.update(new)
        self._handed_down.update(new)
        self._stored.difference_update(gone)
        self._handed_down.difference_update(gone)

    def _note(self, key: bytes, pages: Sequence[int]) -> None:
        if key in self._handed_down or not all(pages):
            return
        self._handed_down.add(key)
        self._keys.append(key)
        for noted, page in zip(self._pages, pages, strict=True):
            noted.append(page)
