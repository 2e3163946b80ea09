"""The protocol of a decode mode: what it can do, as data, and its one `step`.

It knows neither scheduling nor the executor, and of the runner only what a mode may ask of it. A
mode's state lives in relay fields only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from aserve.gpu.models.base import CausalModel
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import FutureMap, RelayField
from aserve.gpu.step.inputs import DeviceBatch, DeviceStep, HeldSample
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.step.results import Emitted
from aserve.messages.executor import DecodeCaps

OnPublish = Callable[[Tensor], None]


class StepRunner(Protocol):
    """The parts of a step, which a mode puts together (runner.py)."""

    model: CausalModel
    state: DeviceState
    relay: FutureMap

    def init_forward(self, batch: DeviceBatch) -> ForwardBatch: ...

    def forward(self, batch: ForwardBatch) -> Tensor: ...

    def hold(self, step: DeviceStep, hidden: Tensor) -> None: ...

    def sample(self, step: DeviceStep, hidden: Tensor) -> Sampled: ...

    def sample_held(self, held: HeldSample) -> Sampled: ...


class DecodeMode(Protocol):
    caps: DecodeCaps
    draws_once: bool  # a step is one forward, then one token for each sampled row
    fields: tuple[RelayField, ...]  # beside the last token; with SEQ_LEN among them it publishes

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Emitted:
        """From init_new to stash. `publish` gets the KV lengths int64 [rows] after the step, as
        soon as they are known, and only in a mode that declares SEQ_LEN."""

    def sample_held(self, runner: StepRunner, held: HeldSample) -> Emitted:
        """The part from sample on, for rows whose logits were held."""
