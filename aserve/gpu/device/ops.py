"""How a device computes, fastest, what a model of one dtype needs beside its products.

It knows no device: each says which ways are its own.
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


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """In torch, if nothing else is said."""

    elementwise: Elementwise = PLAIN  # the layers between the products
    rope_and_store_kv: RopeAndStoreKv = (
        rope_then_store_kv  # how heads are turned, and get into their pools
    )
    row_ops: RowOps = PLAIN_ROWS  # how rows of the relay are read and written
    resolve: Resolve = resolve  # how a step's words become the model's inputs
    sample_ops: SampleOps = PLAIN_OPS


TORCH_OPS = DeviceOps()


class FusedStep(Protocol):
    def can_run(self, batch: ForwardBatch) -> bool: ...

    def run(self, batch: ForwardBatch) -> Tensor:
        """As `CausalModel.forward` with attention over the batch's KV: stores keys and values ->
        hidden states after the norm [tokens, hidden]."""

    def can_step(self, plan: StepPlan) -> bool:
        """Of a mode that runs one forward, and draws and stashes one token for each row."""

    def step(self, plan: StepPlan) -> Packed:
        """As `ModelRunner.step` without debug checks: resolves, runs, draws and stashes."""


MakeFusedStep: TypeAlias = Callable[[CausalModel, DeviceState], FusedStep | None]  # None: has none
