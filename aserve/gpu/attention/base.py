"""The protocol of attention over paged KV: plan a forward once, then attend in every layer.

It knows no model and no step. A backend keeps no state between forwards: what it prepared is in the
plan, and the plan is on its ForwardBatch or in its caller's hands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aserve.gpu.attention.capabilities import AttentionSite, Capabilities
from aserve.gpu.attention.static_plans import StaticPlans
from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.models.attend import Attend


class AttentionBackend(Protocol):
    """Where a forward is captured, `plan` is too, unless there are `static_plans`: it reads lengths
    on the device, and of the host only spans and bounds, which are the same at each replay."""

    @property
    def static_plans(self) -> StaticPlans | None: ...

    def plan(self, batch: ForwardBatch) -> object:
        """What all layers of one forward share."""

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        """The callable that the model gets: turns, stores in the batch's slots, then attends."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A backend before it is built. `build` may raise AttentionUnavailable."""

    can: Capabilities
    build: Callable[[AttentionSite], AttentionBackend]


class AttentionUnavailable(Exception):
    """This machine lacks what the backend needs; the text says what."""
