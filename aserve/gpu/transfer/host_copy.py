"""`HostCopy`: values on their way from the device to the host, and `PublishedLens` among them."""

from __future__ import annotations

import threading

import numpy as np

from aserve.gpu.device.base import Event
from aserve.gpu.transfer.pinned import PinnedSlot, PinnedSlots
from aserve.messages.base import ArrayI32


class HostCopy:
    """A copy of `num_words` words on its way into a pinned slot, which is given back as soon as the
    words were read.

    Two threads may read: the waiter, and the executor thread where it needs the values to plan.
    """

    __slots__ = ("_event", "_lock", "_num_words", "_slot", "_slots", "_words")

    def __init__(self, slots: PinnedSlots, slot: PinnedSlot, num_words: int, event: Event) -> None:
        self._slots = slots
        self._slot = slot
        self._num_words = num_words
        self._event = event
        self._lock = threading.Lock()
        self._words: ArrayI32 | None = None

    def wait(self) -> ArrayI32:
        """int32 [num_words], once the device has copied them."""
        if self._words is None:
            self._event.synchronize()
        return self.read()

    def read(self) -> ArrayI32:
        """int32 [num_words]. Only after the copy's event."""
        with self._lock:
            if self._words is None:
                # NOTE: the slot's memory belongs to another step as soon as it was given back.
                self._words = self._slot.words[: self._num_words].copy()
                self._slots.give_back(self._slot)
            return self._words


class PublishedLens:
    """The last published length of each row, for backends that need exact lengths on the host.
    Written by the executor thread."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: dict[int, tuple[HostCopy, int]] = {}  # by row, with the index in the copy

    def note(self, rows: ArrayI32, copy: HostCopy) -> None:
        """`copy` holds the lengths of `rows` [n], in this order, and may still be on its way."""
        for index, row in enumerate(map(int, rows)):
            self._copies[row] = copy, index

    def exact(self, rows: ArrayI32, kv_lens: ArrayI32, is_bound: ArrayI32) -> ArrayI32:
        """kv_lens [rows] with every bound replaced. Waits for the device if it must."""
        lens = kv_lens.copy()
        for bound in np.flatnonzero(is_bound):
            copy, index = self._copies[int(rows[bound])]
            lens[bound] = copy.wait()[index]
        return lens

    def clear(self) -> None:
        self._copies.clear()
