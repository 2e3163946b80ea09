"""Host memory of plans, and wrappers that have some of their own, in turn: the device reads later
what a plan left there, so it is written again only after the plan's event.

It knows no kernel. Written by who plans, on the executor's thread.
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
    """`wrappers` are kept by what they are for."""

    __slots__ = ("_device", "_done", "_memory", "_places", "_views", "wrappers")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._done: Event | None = None
        self._memory = PinnedSlot(device.host_buffer(0))
        self._places: dict[str, slice] = {}
        self._views: dict[str, Tensor] = {}
        self.wrappers: dict[Key, Wrapper] = {}

    def write(self, arrays: Mapping[str, ArrayI32]) -> dict[str, Tensor]:
        """The arrays where the device copies from without blocking. As long as they keep their
        lengths, these are the very tensors of the time before.
        """
        packed = HostArrays()
        for name, array in arrays.items():
            packed.add(name, array)
        if len(self._memory.words) < packed.num_words:
            self._memory = PinnedSlot(self._device.host_buffer(2 * packed.num_words))
            self._places = {}
        indices = packed.write(self._memory.words)
        if indices != self._places:
            words = self._memory.prefix(packed.num_words)
            self._places = indices
            self._views = {name: words[place] for name, place in indices.items()}
        return self._views

    def close(self) -> None:
        """All copies of the plan were asked for."""
        self._done = self._device.mark()

    def finish(self) -> None:
        """Waits until the device has read all of it."""
        self.close()
        self.wait()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()
            self._done = None


class PlanSlots(Generic[Key, Wrapper]):
    """One slot for each plan of the steps in flight and of one step more, so that `take` finds its
    event done."""

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
