"""The protocol of a decode mode, and the parts of a step that a mode combines.

A mode declares what it can do as data and has one `step`. Its state lives in relay fields only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from aserve.gpu.models.base import Attend, CausalModel, DraftModel
from aserve.gpu.sampling.sampler import Sampled
from aserve.gpu.sampling.tree_paths import TreePaths
from aserve.gpu.step.forward_batch import NO_OVERRIDES, DeviceBatch, ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import FutureMap, RelayField
from aserve.gpu.step.held import HeldSample
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.gpu.step.results import Packed
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.executor import DecodeCaps

OnPublish = Callable[[Tensor], None]


class StepRunner(Protocol):
    """The parts of a step. Implemented by runner.py."""

    model: CausalModel
    drafter: DraftModel | None
    state: DeviceState
    relay: FutureMap

    def init_forward(
        self, batch: DeviceBatch, overrides: ForwardOverrides = NO_OVERRIDES
    ) -> ForwardBatch:
        """Returns the inputs of one more forward within the step."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Runs the target model -> hidden states [tokens, hidden], valid until its next forward."""

    def draft(self, batch: ForwardBatch, hidden: Tensor | None = None) -> Tensor:
        """Runs the drafter over its own KV pools -> its hidden states [tokens, draft hidden].
        `hidden`: hidden states of the target for these tokens, if the drafter reads them."""

    def draft_attention(self, batch: ForwardBatch) -> Attend:
        """Returns attention over the drafter's KV pools, for a drafter that runs its parts itself.
        Forwards of this batch's rows and positions may share it."""

    def hold(self, step: DeviceStep, hidden: Tensor, features: tuple[Tensor, ...] = ()) -> None:
        """Keeps the logits of the step's held rows, and `features` of their tokens, until their
        Sample."""

    def sample(self, step: DeviceStep, hidden: Tensor, paths: TreePaths | None = None) -> Sampled:
        """Samples one token for each token of the step that needs logits."""

    def sample_held(self, sample: HeldSample, paths: TreePaths | None = None) -> Sampled:
        """Samples one token for each token of the held rows' windows."""


class DecodeMode(Protocol):
    caps: DecodeCaps
    can_fuse: bool  # a device's fused step may run its steps
    fields: tuple[RelayField, ...]  # relay fields beside the last token; SEQ_LEN: it publishes
    num_forwards: int  # forwards of the target in a step, at most
    num_draft_forwards: int  # forwards of the drafter in a step, at most
    graph_widths: tuple[int, ...]  # tokens per row of the steps that are captured as graphs

    def draft(self, runner: StepRunner, plan: StepPlan, arrays: DeviceArrays) -> None:
        """Writes this step's drafts into the relay, before resolve reads them there. A mode without
        drafts does nothing."""

    def step(self, runner: StepRunner, step: DeviceStep, publish: OnPublish) -> Packed:
        """Runs forward, sampling and stash. A row may get any number of tokens, none included.

        A mode that declares SEQ_LEN calls `publish` with the KV lengths after the step, int64
        [rows], as soon as they are known. Other modes never call it.
        """

    def sample_held(self, runner: StepRunner, held: HeldSample, publish: OnPublish) -> Packed:
        """The part of `step` from sampling on, for rows whose logits were held. A mode that
        declares SEQ_LEN calls `publish` with the KV lengths of these rows."""
