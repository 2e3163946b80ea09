"""Speculative decoding around a device's fused step: a whole step of the speculative mode in a few
calls, without the operators between them.

It does what `Speculative` does for chains whose rows need at most noise: draft, forward and draw,
accept, publish, extend, stash. All other steps run operator by operator, and both kinds may follow
each other, since the relay and the KV pools are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.decode.base import OnPublish
from aserve.gpu.device.fused_step import FusedDecoder, FusedWindows
from aserve.gpu.device.ops import MakeFusedStep
from aserve.gpu.models.base import CausalModel
from aserve.gpu.spec.base import DraftRows
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import SEQ_LEN
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceState
from aserve.gpu.step.results import Packed


class FusedDrafter(Protocol):
    """A drafter as host code and compiled calls. It runs between the two halves of a step."""

    def draft(self, plan: StepPlan) -> None:
        """Writes the drafts of the plan's rows into the relay. Lengths that are bounds in the plan,
        and the rows' last tokens, are in the relay."""

    def extend(self, plan: StepPlan, windows: FusedWindows) -> None:
        """Catches up with the tokens of the step."""


LookUp: TypeAlias = Callable[[DeviceState, DraftRows], Tensor]
# Makes the fused form of a drafter, with fused steps of the device; None where it has none.
FuseDrafter: TypeAlias = Callable[[MakeFusedStep, DeviceState], FusedDrafter | None]


class FusedSpeculation:
    """A `FusedStep`. Without a fused drafter it runs forwards only."""

    __slots__ = ("_drafter", "_target")

    def __init__(self, target: FusedDecoder, drafter: FusedDrafter | None) -> None:
        self._target = target
        self._drafter = drafter

    def can_run(self, batch: ForwardBatch) -> bool:
        return self._target.can_run(batch)

    def run(self, batch: ForwardBatch) -> Tensor:
        return self._target.run(batch)

    def can_step(self, plan: StepPlan) -> bool:
        return self._drafter is not None and self._target.can_step(plan)

    def step(self, plan: StepPlan, publish: OnPublish) -> Packed:
        assert self._drafter is not None
        if plan.num_drafts.any():
            self._drafter.draft(plan)
        windows = self._target.verify(plan)
        is_rejected = (1 + plan.num_drafts - windows.counts) * (windows.counts > 0)
        lens = windows.kv_lens + plan.query_lens - is_rejected
        if plan.num_drafts.any() or plan.is_bound.any():  # otherwise the host knows the lengths
            publish(torch.from_numpy(lens).to(torch.int32))
        self._drafter.extend(plan, windows)
        return windows.packed


class FusedChain:
    """The `FusedDrafter` of a language model that drafts token by token."""

    __slots__ = ("_decoder",)

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder

    def draft(self, plan: StepPlan) -> None:
        self._decoder.draft_chain(plan)

    def extend(self, plan: StepPlan, windows: FusedWindows) -> None:
        self._decoder.extend(plan, windows)


class FusedLookup:
    """The `FusedDrafter` of a drafter without a model, which reads the tables of the engine alone.
    `look_up` returns int64 [rows, <= max_drafts]."""

    __slots__ = ("_look_up", "_state")

    def __init__(self, look_up: LookUp, state: DeviceState) -> None:
        self._look_up = look_up
        self._state = state

    def draft(self, plan: StepPlan) -> None:
        relay = self._state.relay
        drafting = np.flatnonzero(plan.num_drafts)
        rows = torch.from_numpy(plan.rows[drafting].astype(np.int64))
        lens = torch.from_numpy(plan.kv_lens[drafting].astype(np.int64))
        is_bound = torch.from_numpy(plan.is_bound[drafting] > 0)
        starts = plan.query_lens.cumsum() - plan.query_lens
        roots = torch.from_numpy(plan.input_ids[starts[drafting]].astype(np.int64))
        drafts = self._look_up(
            self._state,
            DraftRows(
                iteration=plan.iteration,
                rows=rows,
                lens=torch.where(is_bound, relay.read(SEQ_LEN, rows), lens),
                roots=relay.resolve(roots),
                num_drafts=int(plan.num_drafts.max()),
                max_len=int(plan.len_bounds.max()),
                needs_noise=False,
                counts=torch.from_numpy(plan.num_drafts[drafting].astype(np.int64)),
            ),
        )
        relay.table(DRAFTS)[rows, : drafts.shape[1]] = drafts

    def extend(self, plan: StepPlan, windows: FusedWindows) -> None:
        pass


def fuse_chain(model: CausalModel, make: MakeFusedStep, state: DeviceState) -> FusedDrafter | None:
    if state.draft_pools is None:
        return None
    decoder = make(model, dataclasses.replace(state, pools=state.draft_pools))
    return None if decoder is None else FusedChain(decoder)
