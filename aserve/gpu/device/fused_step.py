"""`FusedStep`: how a device runs a forward, or a whole step, in one call instead of one call per
operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from aserve.gpu.decode.base import OnPublish
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed
from aserve_kernels.draft_chain import ChainKind

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

    plan: StepPlan
    packed: Packed
    counts: Int64s  # [rows], the tokens that each row gets
    token_ids: Int64s  # [tokens], without placeholders
    kv_lens: Int64s  # [rows], exact KV lengths before the step
    hidden: Tensor  # [tokens, hidden], after the final norm; undefined unless `verify` kept them

    @property
    def lens(self) -> Int64s:
        """[rows], the KV lengths after the step, without rejected drafts."""
        num_rejected = (1 + self.plan.num_drafts - self.counts) * (self.counts > 0)
        lens: Int64s = self.kv_lens + self.plan.query_lens - num_rejected
        return lens


class FusedDecoder(FusedStep, Protocol):
    """A fused step whose windows a drafter may follow."""

    def verify(
        self,
        plan: StepPlan,
        capture: HiddenCapture | None = None,
        *,
        is_block: bool = False,
        keeps_hidden: bool = False,
    ) -> FusedWindows:
        """Does the work of `step` but for publishing, and returns what a drafter reads, the hidden
        states of all tokens only with `keeps_hidden`. Fills `capture` as `CausalModel.forward`
        does. Where the relay has distributions of drafts, these are verified by rejection sampling,
        or as blocks."""


@dataclass(frozen=True, slots=True)
class FusedRows:
    """The rows of one forward on the host, int64 [rows] each."""

    rows: Int64s
    lens: Int64s  # KV lengths with this forward's tokens
    query_lens: Int64s

    @property
    def starts(self) -> Int64s:
        """The index of each row's first token."""
        starts: Int64s = self.query_lens.cumsum() - self.query_lens
        return starts


class FusedDraft(Protocol):
    """The forwards of a draft model as compiled calls, over its own KV pools."""

    def draft_chain(self, plan: StepPlan, kind: ChainKind, relay_field: str | None = None) -> None:
        """Drafts the plan's `num_drafts` tokens of each row, one after the other, and writes them
        to the relay. `relay_field` has the rows' hidden states, for kinds that read them."""

    def forward(self, input_ids: Int64s, rows: FusedRows, hidden: Tensor | None = None) -> Tensor:
        """Runs what `DraftModel.forward` runs, attention and KV writes included."""

    def draw(self, hidden: Tensor, rows: Int64s, positions: Int64s, roots: Int64s) -> Int64s:
        """Draws a token from the logits of each hidden state [n, hidden], with the noise of its row
        and position. `roots` [n] are the positions of the windows' roots."""

    def store(self, inputs: Tensor, rows: FusedRows) -> None:
        """Stores the keys and values that each layer makes of `inputs`, [tokens, hidden]."""
