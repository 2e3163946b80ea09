"""The protocol of backends whose plans are made on the host and read by a captured forward.

A plan's buffers stay where they are; what is in them is written anew before each replay. It knows
no graph and no step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from aserve.messages import ArrayI32


@dataclass(frozen=True, slots=True)
class StaticShape:
    """Of a captured forward: each of its rows has `width` tokens, and none is longer than
    `max_len`."""

    num_rows: int
    width: int
    max_len: int


class StaticPlans(Protocol):
    """All are called on the executor's stream, outside of captures. Only `make` may wait for the
    device."""

    def is_better_eager(self, num_rows: int, shared_pages: int) -> bool:
        """Of a step that could be replayed: attention takes a faster way that is not captured."""

    def make(self, shape: StaticShape) -> object:
        """What `bind` takes for a forward of this shape, refreshed for rows of `width` tokens. What
        `bind` and its callable do is captured, once: page tables, rows and lengths are read on the
        device then, so only what the host alone can make needs to be in the plan.
        """

    def refresh(self, plan: object, lens: ArrayI32) -> None:
        """Before a replay: lens int32 [num_rows], KV lengths with the step's own tokens, of which
        the last may be padding's, of `width`. The array is nobody's afterwards: what is copied to
        the device later comes from a buffer of the backend's, free after the step's event.
        """
