"""The protocol of a decode mode: what it can do, as data, and its one `step`.

It knows neither scheduling nor the executor. A mode's state lives in relay fields only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from aserve.gpu.device_batch import DeviceStep
from aserve.gpu.future_map import RelayField
from aserve.gpu.results import Emitted
from aserve.messages import DecodeCaps

if TYPE_CHECKING:
    from aserve.gpu.runner import HeldSample, ModelRunner

OnPublish = Callable[[Tensor], None]


class DecodeMode(Protocol):
    caps: DecodeCaps
    draws_once: bool  # a step is one forward, then one token for each sampled row
    fields: tuple[RelayField, ...]  # beside the last token; with SEQ_LEN among them it publishes

    def step(self, runner: ModelRunner, step: DeviceStep, publish: OnPublish) -> Emitted:
        """From init_new to stash. `publish` gets the KV lengths int64 [rows] after the step, as
        soon as they are known, and only in a mode that declares SEQ_LEN."""

    def sample_held(self, runner: ModelRunner, held: HeldSample) -> Emitted:
        """The part from sample on, for rows whose logits were held."""
