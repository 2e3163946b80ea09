"""The protocol of what runs some forwards, and some whole steps, in fewer calls than their parts
take.

It knows no device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from aserve.gpu.forward_batch import ForwardBatch
from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.resolve import DeviceState
from aserve.gpu.results import Packed
from aserve.gpu.step_plan import StepPlan


class Shortcut(Protocol):
    def can_run(self, batch: ForwardBatch) -> bool: ...

    def run(self, batch: ForwardBatch) -> Tensor:
        """As `CausalModel.forward` with attention over the batch's KV: stores keys and values ->
        hidden states after the norm [tokens, hidden]."""

    def can_step(self, plan: StepPlan) -> bool:
        """Of a mode that runs one forward, and draws and stashes one token for each row."""

    def step(self, plan: StepPlan) -> Packed:
        """As `ModelRunner.step` without debug checks: resolves, runs, draws and stashes."""


MakeShortcut: TypeAlias = Callable[[CausalModel, DeviceState], Shortcut | None]  # None: has none
