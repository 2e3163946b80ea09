"""`StaticPlans` for FlashInfer: the plans of captured forwards, refreshed before each replay.

The kernels of a captured forward read the addresses of one plan. So all wrappers of a shape share
their device memory, and `refresh` runs the planner again on new lengths, which writes that memory
on the stream before the replay. A refresh is one call of the compiled planner where plan.py finds
it, otherwise the package's whole `plan`.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import AttentionSite, StaticShape
from aserve.gpu.attention.flashinfer.cascade import Cascades
from aserve.gpu.attention.flashinfer.page_indices import PageIndices
from aserve.gpu.attention.flashinfer.plan import (
    ALL_ROWS,
    FlashPlan,
    PlanPart,
    Replan,
    find_planner_call,
    write_arrays,
)
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlot, PlanSlots
from aserve.gpu.attention.flashinfer.wrappers import LayerKind, PlanArrays, Wrapper, Wrappers
from aserve.messages.base import ArrayI32
from aserve_kernels.packed_mask import PackedMask

logger = logging.getLogger(__name__)

Slot: TypeAlias = PlanSlot[LayerKind, Replan]


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """The plan of captured forwards of one shape. The wrappers of all slots share device memory
    with those of `value`, whose kernels are captured, so a replan by any slot takes effect there.
    """

    query_lens: ArrayI32
    slots: PlanSlots[LayerKind, Replan]  # each call plans from the arrays in its slot
    value: FlashPlan


class FlashStaticPlans:
    """Makes and refreshes one StaticPlan per shape. `cascades` says when a step should run eagerly
    with cascade attention instead."""

    __slots__ = (
        "_bits_buffers",
        "_cascades",
        "_has_warned",
        "_index_buffers",
        "_kinds",
        "_made",
        "_site",
        "_wrappers",
    )

    def __init__(
        self,
        wrappers: Wrappers,
        site: AttentionSite,
        kinds: tuple[LayerKind, ...],
        *,
        cascades: Cascades,
    ) -> None:
        self._wrappers = wrappers
        self._site = site
        self._kinds = kinds
        self._cascades = cascades
        self._made: dict[StaticShape, StaticPlan] = {}
        self._index_buffers: dict[int, Tensor] = {}  # by layer group
        self._bits_buffers: dict[int, Tensor] = {}  # by layer group
        self._has_warned = False

    def is_better_eager(self, num_rows: int, shared_pages: int) -> bool:
        return self._cascades.is_worthwhile(num_rows, shared_pages)

    def make(self, shape: StaticShape) -> object:
        if shape not in self._made:
            self._made[shape] = self._make(shape)
        plan = self._made[shape]
        self.refresh(plan, plan.query_lens)
        return plan

    def refresh(self, plan: object, lens: ArrayI32) -> None:
        if not isinstance(plan, StaticPlan):
            raise BugError(f"a captured forward's plan is of another backend: {plan!r}")
        slot = plan.slots.take()
        self._write(slot, lens, plan.query_lens)
        for replan in slot.wrappers.values():
            replan()
        slot.close()

    def _make(self, shape: StaticShape) -> StaticPlan:
        site = self._site
        max_pages = shape.num_rows * -(-shape.max_len // site.pools.page_size)
        groups = {kind.group for kind in self._kinds}
        max_bytes = 0
        if site.has_tree_masks and shape.width > 1:
            max_bytes = -(-shape.width * shape.max_len // 8)
        pages = {
            group: PageIndices.empty(
                shape.num_rows,
                self._index_buffer(group, max_pages),
                self._bits_buffer(group, shape.num_rows * max_bytes),
                max_mask_bytes=max_bytes,
            )
            for group in groups
        }
        cu_query_lens = self._ints(shape.num_rows + 1)
        slots = PlanSlots[LayerKind, Replan](site.device, site.num_plans)
        wrappers: dict[LayerKind, Wrapper] = {}
        for slot, kind in itertools.product(slots, self._kinds):
            wrapper = self._wrappers.make_static(
                kind, pages[kind.group], cu_query_lens=cu_query_lens, is_decode=shape.width == 1
            )
            mask = pages[kind.group].mask
            slot.wrappers[kind] = self._replan(slot, kind, wrapper, shape=shape, mask=mask)
            wrappers[kind] = wrapper
        return StaticPlan(
            _query_lens(shape), slots, FlashPlan(pages, (PlanPart(ALL_ROWS, wrappers),))
        )

    def _index_buffer(self, group: int, num_pages: int) -> Tensor:
        """The page indices of all captured forwards share one buffer per group: each forward writes
        them before it reads them, and replays run one after the other. Captures start with the
        largest shape, so the buffer rarely grows."""
        if len(self._index_buffers.get(group, ())) < num_pages:
            self._index_buffers[group] = self._ints(num_pages)
        return self._index_buffers[group][:num_pages]

    def _bits_buffer(self, group: int, num_bytes: int) -> Tensor | None:
        """The masks of draft trees share one buffer per group in the same way."""
        if not num_bytes:
            return None
        if len(self._bits_buffers.get(group, ())) <= num_bytes:
            where = self._site.pools.device
            self._bits_buffers[group] = torch.empty(num_bytes + 1, dtype=torch.uint8, device=where)
        return self._bits_buffers[group][: num_bytes + 1]

    def _ints(self, num: int) -> Tensor:
        return torch.empty(num, dtype=torch.int32, device=self._site.pools.device)

    def _replan(
        self,
        slot: Slot,
        kind: LayerKind,
        wrapper: Wrapper,
        *,
        shape: StaticShape,
        mask: PackedMask | None,
    ) -> Replan:
        """Returns a call that plans `wrapper` from the numbers that are in the slot's arrays by
        then.
        """
        query_lens = _query_lens(shape)

        def fill(lens: ArrayI32) -> PlanArrays:
            slot.finish()
            return self._write(slot, lens, query_lens)[kind.group]

        # The forward itself writes the page indices, so the planner has none to copy.
        plan = partial(
            self._wrappers.plan,
            *(wrapper, kind, fill(query_lens)),
            indices=self._ints(0),
            width=shape.width,
            mask=mask,
        )
        longest = np.full_like(query_lens, shape.max_len)
        call = find_planner_call(
            wrapper, plan, [partial(fill, lens) for lens in (query_lens, longest)]
        )
        slot.finish()
        if call is None and shape.width == 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "this FlashInfer release cannot be replanned in one call, so each replayed step "
                "makes 7 calls or more in addition per window size; 0.6.3 and 0.7.2 can"
            )
        return call or plan

    def _write(self, slot: Slot, lens: ArrayI32, query_lens: ArrayI32) -> dict[int, PlanArrays]:
        (arrays,) = write_arrays(
            slot, self._site, lens=lens, query_lens=query_lens, kinds=self._kinds
        )
        return arrays


def _query_lens(shape: StaticShape) -> ArrayI32:
    return np.full(shape.num_rows, shape.width, np.int32)
