"""`FusedStep`: how a device runs a forward, or a whole step, in one call instead of one call per
operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from aserve.gpu.decode.base import OnPublish
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed

Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class FusedStep(Protocol):
    """It decides for each batch or plan whether it can run it."""

    def can_run(self, batch: ForwardBatch) -> bool: ...

    def run(self, batch: ForwardBatch) -> Tensor:
        """Runs what `CausalModel.forward` runs, attention and KV writes included. Returns the
        hidden states after the final norm, [tokens, hidden]."""

    def can_step(self, plan: StepPlan) -> bool:
        """Whether `step` can run this plan. It is asked only in decode modes with `can_fuse`."""

    def step(self, plan: StepPlan, publish: OnPublish) -> Packed:
        """Runs what `ModelRunner.step` runs without debug checks: it resolves the inputs, runs the
        model, draws the tokens and stashes them in the relay. With drafts in the plan it accepts
        those that are right. `publish` is called in modes that publish lengths."""


@dataclass(frozen=True, slots=True)
class FusedWindows:
    """A step of windows that has run, on the host."""

    packed: Packed
    counts: Int64s  # [rows], the tokens that each row gets
    token_ids: Int64s  # [tokens], without placeholders
    kv_lens: Int64s  # [rows], exact KV lengths before the step
    hidden: Tensor  # [tokens, hidden], after the final norm


class FusedDecoder(FusedStep, Protocol):
    """A fused step with the parts of speculation, for a target or for a draft model of its own."""

    def verify(self, plan: StepPlan) -> FusedWindows:
        """Does the work of `step` but for publishing, and returns what a drafter reads."""

    def draft_chain(self, plan: StepPlan) -> None:
        """Drafts the plan's `num_drafts` tokens of each row, one after the other, and writes them
        to the relay. Writes the KV of the root and of all drafts but the last one."""

    def extend(self, plan: StepPlan, windows: FusedWindows) -> None:
        """Writes the KV of the step's accepted tokens that `draft_chain` has not computed."""
