"""The block drafter as compiled calls: a forward of the block, the draws, and the context's KV."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.device.fused_step import FusedDraft, FusedRows, FusedWindows
from aserve.gpu.spec.fused import exact_lens, kept_tokens
from aserve.gpu.step.future_map import LAST_TOKEN, FutureMap
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.resolve import DRAFTS


class FusedBlock:
    """The `FusedDrafter` of a `BlockDrafter`. `context` makes context features of the target's
    hidden states."""

    __slots__ = ("_context", "_mask_id", "_model", "_relay")

    def __init__(
        self,
        model: FusedDraft,
        relay: FutureMap,
        *,
        mask_id: int,
        context: Callable[[tuple[Tensor, ...]], Tensor],
    ) -> None:
        self._model = model
        self._relay = relay
        self._mask_id = mask_id
        self._context = context

    def draft(self, plan: StepPlan) -> None:
        drafting = np.flatnonzero(plan.num_drafts)
        rows, widths = plan.rows[drafting].astype(np.int64), 1 + plan.num_drafts[drafting]
        lens = exact_lens(plan, self._relay)[drafting]
        starts = widths.cumsum() - widths
        depths = np.arange(widths.sum()) - np.repeat(starts, widths)
        ids = np.full(len(depths), self._mask_id, np.int64)
        ids[starts] = self._relay.table(LAST_TOKEN).numpy()[rows]
        hidden = self._model.forward(ids, FusedRows(rows, lens + widths, widths.astype(np.int64)))
        masks = np.flatnonzero(depths)
        rows, depths = np.repeat(rows, widths)[masks], depths[masks]
        roots = np.repeat(lens, widths)[masks]
        hidden = hidden.index_select(0, torch.from_numpy(masks))
        drafts = self._model.draw(hidden, rows, roots + depths, roots)
        self._relay.table(DRAFTS).numpy()[rows, depths - 1] = drafts

    def extend(self, plan: StepPlan, windows: FusedWindows, features: tuple[Tensor, ...]) -> None:
        kept = kept_tokens(plan, windows, self._relay)
        own = tuple(values.index_select(0, kept.indices) for values in features)
        self._model.store(self._context(own), kept.rows)
