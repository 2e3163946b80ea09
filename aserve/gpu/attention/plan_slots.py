"""Host memory of plans, and wrappers that have some of their own, in turn: the device reads later
what a plan left there, so it is written again only after the plan's event.

It knows no kernel. Written by who plans, on the executor's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from aserve.gpu.device.base import Device, Event
from aserve.gpu.sections import HostSections
from aserve.messages import ArrayI32

Key = TypeVar("Key")
Wrapper = TypeVar("Wrapper")


class PlanSlot(Generic[Key, Wrapper]):
    """`wrappers` are kept by what they are for."""

    __slots__ = ("_device", "_done", "_words", "wrappers")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._done: Event | None = None
        self._words = torch.empty(0, dtype=torch.int32)
        self.wrappers: dict[Key, Wrapper] = {}

    def write(self, arrays: Mapping[str, ArrayI32]) -> dict[str, Tensor]:
        """The arrays where the device copies from without blocking."""
        sections = HostSections()
        for name, array in arrays.items():
            sections.add(name, array)
        if len(self._words) < sections.num_words:
            self._words = self._device.host_buffer(2 * sections.num_words)
        places = sections.write(self._words.numpy())
        return {name: self._words[place] for name, place in places.items()}

    def close(self) -> None:
        """All copies of the plan were asked for."""
        self._done = self._device.mark()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()
            self._done = None


class PlanSlots(Generic[Key, Wrapper]):
    """One more than steps may be in flight: so `take` finds its event done."""

    __slots__ = ("_next", "_slots")

    def __init__(self, device: Device, num_in_flight: int) -> None:
        self._slots = tuple(PlanSlot[Key, Wrapper](device) for _ in range(num_in_flight + 1))
        self._next = 0

    def __iter__(self) -> Iterator[PlanSlot[Key, Wrapper]]:
        return iter(self._slots)

    def take(self) -> PlanSlot[Key, Wrapper]:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait()
        return slot
