"""Pinned memory and wrappers for plans, used in rotation.

The device reads a plan's pinned memory after the planner has returned, so a slot is used again only
after the event that was recorded behind its plan. Slots are written on the executor's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from torch import Tensor

from aserve.gpu.device.base import Device, Event
from aserve.gpu.transfer.pinned import PinnedSlot
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.base import ArrayI32

Key = TypeVar("Key")
Wrapper = TypeVar("Wrapper")


class PlanSlot(Generic[Key, Wrapper]):
    """Pinned memory for one plan's arrays, and wrappers, which have pinned memory of their own."""

    __slots__ = ("_device", "_done", "_indices", "_memory", "_views", "wrappers")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._done: Event | None = None
        self._memory = PinnedSlot(device.host_buffer(0))
        self._indices: dict[str, slice] = {}
        self._views: dict[str, Tensor] = {}
        self.wrappers: dict[Key, Wrapper] = {}

    def write(self, arrays: Mapping[str, ArrayI32]) -> dict[str, Tensor]:
        """Copies the arrays to pinned memory, from which the device copies without blocking. The
        returned tensors are the same objects as long as names and lengths stay the same.
        """
        packed = HostArrays()
        for name, array in arrays.items():
            packed.add(name, array)
        if len(self._memory.words) < packed.num_words:
            self._memory = PinnedSlot(self._device.host_buffer(2 * packed.num_words))
            self._indices = {}
        indices = packed.write(self._memory.words)
        if indices != self._indices:
            words = self._memory.prefix(packed.num_words)
            self._indices = indices
            self._views = {name: words[place] for name, place in indices.items()}
        return self._views

    def close(self) -> None:
        """Records the event behind all copies of the plan."""
        self._done = self._device.mark()

    def finish(self) -> None:
        """Waits until the device has read the whole slot."""
        self.close()
        self.wait()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()
            self._done = None


class PlanSlots(Generic[Key, Wrapper]):
    """A ring of slots: one for each plan of the steps in flight and of one step more, so that
    `take` does not have to wait."""

    __slots__ = ("_next", "_slots")

    def __init__(self, device: Device, num_plans: int) -> None:
        self._slots = tuple(PlanSlot[Key, Wrapper](device) for _ in range(num_plans))
        self._next = 0

    def __iter__(self) -> Iterator[PlanSlot[Key, Wrapper]]:
        return iter(self._slots)

    def take(self) -> PlanSlot[Key, Wrapper]:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait()
        return slot
