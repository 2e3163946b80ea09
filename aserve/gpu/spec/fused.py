"""Speculative decoding around a device's fused step: a whole step of the speculative mode in a few
calls, without the operators between them.

It does what `Speculative` does for chains whose rows need at most noise: draft, forward and draw,
accept, publish, extend, stash. All other steps run operator by operator, and both kinds may follow
each other, since the relay and the KV pools are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.decode.base import OnPublish
from aserve.gpu.device.fused_step import FusedDecoder, FusedRows, FusedWindows, Int64s
from aserve.gpu.device.ops import MakeFusedDraft
from aserve.gpu.spec.base import DraftRows, HiddenInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, FutureMap
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS, DeviceState
from aserve.gpu.step.results import Packed


class FusedDrafter(Protocol):
    """A drafter as host code and compiled calls. It runs between the two halves of a step."""

    def draft(self, plan: StepPlan) -> None:
        """Writes the drafts of the plan's rows into the relay. Lengths that are bounds in the plan,
        and the rows' last tokens, are in the relay."""

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        """Catches up with the tokens of the step. `features` are as in `Verified`."""


LookUp: TypeAlias = Callable[[DeviceState, DraftRows], Tensor]
# Makes the fused form of a drafter, with compiled calls of the device; None where it has none.
FuseDrafter: TypeAlias = Callable[[MakeFusedDraft, DeviceState], FusedDrafter | None]
BoolArray: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


class FusedSpeculation:
    """A `FusedStep`. Without a fused drafter it runs forwards, and the steps that skip it. Its
    verification is coupled, or where the relay keeps the distributions of drafts, rejection
    sampling or block verification (`is_block`)."""

    __slots__ = ("_drafter", "_inputs", "_is_block", "_target")

    def __init__(
        self,
        target: FusedDecoder,
        drafter: FusedDrafter | None,
        inputs: HiddenInputs,
        *,
        is_block: bool = False,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._inputs = inputs
        self._is_block = is_block

    def can_run(self, batch: ForwardBatch) -> bool:
        return self._target.can_run(batch)

    def run(self, batch: ForwardBatch) -> Tensor:
        return self._target.run(batch)

    def can_step(self, plan: StepPlan) -> bool:
        is_covered = self._drafter is not None or plan.batch.skips_drafter
        return is_covered and self._target.can_step(plan)

    def step(self, plan: StepPlan, publish: OnPublish) -> Packed:
        drafter = None if plan.batch.skips_drafter else self._drafter
        if drafter is not None and plan.num_drafts.any():
            drafter.draft(plan)
        capture = None if drafter is None else self._inputs.capture()
        keeps_hidden = drafter is not None and not self._inputs.is_empty
        windows = self._target.verify(
            plan, capture, is_block=self._is_block, keeps_hidden=keeps_hidden
        )
        if plan.batch.verify or not plan.is_exact:  # otherwise the host knows the lengths
            publish(torch.from_numpy(windows.lens).to(torch.int32))
        if drafter is not None:
            drafter.extend(plan, windows, self._inputs.features(capture, windows.hidden))
        return windows.packed


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
        starts = plan.query_lens.cumsum() - plan.query_lens
        roots = torch.from_numpy(plan.input_ids[starts[drafting]].astype(np.int64))
        drafts = self._look_up(
            self._state,
            DraftRows(
                iteration=plan.iteration,
                rows=rows,
                lens=torch.from_numpy(exact_lens(plan, relay)[drafting]),
                roots=relay.resolve(roots),
                num_drafts=int(plan.num_drafts.max()),
                max_len=int(plan.len_bounds.max()),
                needs_noise=False,
                counts=torch.from_numpy(plan.num_drafts[drafting].astype(np.int64)),
            ),
        )
        relay.table(DRAFTS)[rows, : drafts.shape[1]] = drafts

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens of a step without rejected drafts, row after row, on the host."""

    rows: FusedRows
    indices: Tensor  # int64 [kept], among the step's tokens
    last: Int64s  # [rows], the index of each row's last token among the kept ones
    next_ids: Int64s  # [kept], the token after each
    is_sampled: BoolArray  # [rows]

    def of_last(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """values [kept, ...] -> the sampled rows int64 [n], and the values at the last token of
        each."""
        sampled = np.flatnonzero(self.is_sampled)
        rows, last = self.rows.rows[sampled], self.last[sampled]
        return torch.from_numpy(rows), values.index_select(0, torch.from_numpy(last))


def kept_tokens(plan: StepPlan, windows: FusedWindows, relay: FutureMap) -> KeptTokens:
    rows, query_lens = plan.rows.astype(np.int64), windows.lens - windows.kv_lens
    starts, ends = plan.query_lens.cumsum() - plan.query_lens, query_lens.cumsum()
    indices = np.repeat(starts - (ends - query_lens), query_lens) + np.arange(ends[-1])
    next_ids = windows.token_ids[np.minimum(indices + 1, len(windows.token_ids) - 1)]
    is_sampled = windows.counts > 0
    drawn = relay.table(LAST_TOKEN).numpy()[rows]
    next_ids[ends - 1] = np.where(is_sampled, drawn, plan.next_ids)
    own = FusedRows(rows, windows.lens, query_lens)
    return KeptTokens(own, torch.from_numpy(indices), ends - 1, next_ids, is_sampled)


def exact_lens(plan: StepPlan, relay: FutureMap) -> Int64s:
    """int64 [rows], the KV lengths before the step. Bounds are replaced by published lengths."""
    lens: Int64s = np.where(
        plan.is_bound > 0, relay.table(SEQ_LEN).numpy()[plan.rows], plan.kv_lens
    )
    return lens
