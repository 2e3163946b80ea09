"""Pinned host memory for copies to and from the device: `PinnedSlots`, whose buffers belong to one
step at a time, and `to_device` for arrays that are not staged with a step.

The executor thread takes a slot. The waiter gives it back after the event of the step that used it,
because the device may read or write the slot until then.
"""

from __future__ import annotations

import queue

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.gpu.device.base import Device
from aserve.messages.base import ArrayI32

MIN_WORDS = 4096
MAX_PREFIXES = 256  # more than captured steps have lengths
POISON = -2_004_318_072  # 0x88888888, which is no valid token, row, length or count


class PinnedSlot:
    """One buffer. `words` (numpy) and `prefix` (torch) are views of the same int32 memory."""

    __slots__ = ("_buffer", "_prefixes", "words")

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._prefixes: dict[int, Tensor] = {}
        self.words: ArrayI32 = buffer.numpy()

    def prefix(self, num_words: int) -> Tensor:
        """Returns the first `num_words` words, int32 [num_words].

        PERF: the views are kept, which saves one torch call per step when lengths repeat.
        """
        view = self._prefixes.get(num_words)
        if view is None:
            if len(self._prefixes) == MAX_PREFIXES:
                self._prefixes.clear()
            view = self._prefixes[num_words] = self._buffer[:num_words]
        return view


class PinnedSlots:
    """A pool of slots that grows on demand to the number of steps in flight.

    In debug mode a slot is overwritten when it is given back, so that a late reader always sees
    garbage. Otherwise it would see garbage only when another step has taken the slot meanwhile.
    """

    __slots__ = ("_device", "_free", "_is_debug")

    def __init__(self, device: Device, *, is_debug: bool = False) -> None:
        self._device = device
        self._is_debug = is_debug
        self._free: queue.SimpleQueue[PinnedSlot] = queue.SimpleQueue()

    def take(self, num_words: int) -> PinnedSlot:
        """Returns a slot of at least `num_words` words. A free slot that is too small is
        discarded.
        """
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


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Returns the values on the device. The host does not wait for CUDA's stream: torch keeps the
    pinned memory until the copy is done."""
    tensor, is_cuda = torch.from_numpy(values), device.type == "cuda"
    return (tensor.pin_memory() if is_cuda else tensor).to(device, non_blocking=is_cuda)
