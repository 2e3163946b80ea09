"""Host buffers that copies to and from the device go through, each in use by one step at a time.

It knows nothing of what is in them. A slot is taken by the executor thread and given back by the
waiter, after the event of the step that used it: before, the device may still read or write it.
"""

from __future__ import annotations

import queue

import numpy as np
from torch import Tensor

from aserve.gpu.device.base import Device
from aserve.messages.base import ArrayI32

MIN_WORDS = 4096
MAX_FRONTS = 256  # more than captured steps have lengths
POISON = -2_004_318_072  # no token, row, length or count: 0x88888888


class PinnedSlot:
    """`words` and what `front` gives are the same int32 memory."""

    __slots__ = ("_buffer", "_fronts", "words")

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._fronts: dict[int, Tensor] = {}
        self.words: ArrayI32 = buffer.numpy()

    def front(self, num_words: int) -> Tensor:
        """The first ones. PERF: not one more call of torch where a step is as long as others."""
        found = self._fronts.get(num_words)
        if found is None:
            if len(self._fronts) == MAX_FRONTS:
                self._fronts.clear()
            found = self._fronts[num_words] = self._buffer[:num_words]
        return found


class PinnedSlots:
    """As many slots as steps are in flight at most, made when first needed.

    In debug mode a slot is overwritten when it is given back, so that whoever still reads it shows:
    otherwise only the next step that takes the slot changes it, which is a race.
    """

    __slots__ = ("_device", "_free", "_is_debug")

    def __init__(self, device: Device, *, is_debug: bool = False) -> None:
        self._device = device
        self._is_debug = is_debug
        self._free: queue.SimpleQueue[PinnedSlot] = queue.SimpleQueue()

    def take(self, num_words: int) -> PinnedSlot:
        """A slot of at least so many words. A free one that is too small is dropped for it."""
        try:
            slot = self._free.get_nowait()
        except queue.Empty:
            return self._new(num_words)
        return slot if len(slot.words) >= num_words else self._new(num_words)

    def give_back(self, slot: PinnedSlot) -> None:
        if self._is_debug:
            slot.words.fill(POISON)
        self._free.put(slot)

    def _new(self, num_words: int) -> PinnedSlot:
        capacity = 1 << int(np.ceil(np.log2(max(num_words, MIN_WORDS))))
        return PinnedSlot(self._device.host_buffer(capacity))
