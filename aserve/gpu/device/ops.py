"""The fused operators that a device provides for one dtype, and the fused step that it may have.

Defaults are plain torch. Each device fills in what it does faster (`Device.ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from aserve.gpu.kv.store import RopeAndStoreKv, rope_then_store_kv
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.gpu.models.base import CausalModel
from aserve.gpu.sampling.ops import PLAIN_OPS, SampleOps
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import PLAIN_ROWS, RowOps
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState, Resolve, resolve
from aserve.gpu.step.results import Packed


class FusedStep(Protocol):
    """Runs some forwards, and some whole steps, in one call instead of one call per operator."""

    def can_run(self, batch: ForwardBatch) -> bool: ...

    def run(self, batch: ForwardBatch) -> Tensor:
        """As `CausalModel.forward` with attention over the batch's KV: stores keys and values ->
        hidden states after the norm [tokens, hidden]."""

    def can_step(self, plan: StepPlan) -> bool:
        """Of a mode that runs one forward, and draws and stashes one token for each row."""

    def step(self, plan: StepPlan) -> Packed:
        """As `ModelRunner.step` without debug checks: resolves, runs, draws and stashes."""


# None where the device has no fused step for this model.
MakeFusedStep: TypeAlias = Callable[[CausalModel, DeviceState], FusedStep | None]


def no_fused_step(_model: CausalModel, _state: DeviceState) -> None:
    """For devices that run every step operator by operator."""


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """The operators of one device and dtype; each default is the torch reference."""

    elementwise: Elementwise = PLAIN  # norms, residual sums and gated activations
    rope_and_store_kv: RopeAndStoreKv = rope_then_store_kv
    row_ops: RowOps = PLAIN_ROWS  # gathers and scatters rows of the relay
    resolve: Resolve = resolve  # turns a step's staged words into the model's inputs
    sample_ops: SampleOps = PLAIN_OPS
    fused_step: MakeFusedStep = no_fused_step


TORCH_OPS = DeviceOps()
