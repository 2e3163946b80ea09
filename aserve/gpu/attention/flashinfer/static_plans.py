"""FlashInfer's plans of captured forwards: `StaticPlans`.

Before each replay the host plans anew, in one call where the package lets us. It knows no forward
that runs eagerly. Written by make and refresh: workspaces, in turn.
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
from aserve.gpu.attention.flashinfer.page_indices import PageList
from aserve.gpu.attention.flashinfer.plan import FlashPlan, Replan, call_of_planner, write_arrays
from aserve.gpu.attention.flashinfer.plan_buffers import PlanSlot, PlanSlots
from aserve.gpu.attention.flashinfer.wrappers import Arrays, Problem, Wrapper, Wrappers
from aserve.messages.base import ArrayI32

logger = logging.getLogger(__name__)

Slot: TypeAlias = PlanSlot[Problem, Replan]


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """Of captured forwards of one shape. The wrappers of all slots share what is on the device, so
    that each plans for those in `value`, whose kernels are captured."""

    query_lens: ArrayI32
    slots: PlanSlots[Problem, Replan]  # whose calls plan for the numbers that were written there
    value: FlashPlan


class FlashStaticPlans:
    """Of layers of these `kinds`; `cascades` say when two levels are better."""

    __slots__ = (
        "_cascades",
        "_has_warned",
        "_kinds",
        "_made",
        "_rooms",
        "_site",
        "_wrappers",
    )

    def __init__(
        self,
        wrappers: Wrappers,
        site: AttentionSite,
        kinds: tuple[Problem, ...],
        *,
        cascades: Cascades,
    ) -> None:
        self._wrappers = wrappers
        self._site = site
        self._kinds = kinds
        self._cascades = cascades
        self._made: dict[StaticShape, StaticPlan] = {}
        self._rooms: dict[int, Tensor] = {}  # by layer group
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
        groups = {problem.group for problem in self._kinds}
        lists = {
            group: PageList.new(shape.num_rows, self._room(group, max_pages)) for group in groups
        }
        cu_query_lens = self._ints(shape.num_rows + 1)
        slots = PlanSlots[Problem, Replan](site.device, site.num_plans)
        wrappers: dict[Problem, Wrapper] = {}
        for slot, problem in itertools.product(slots, self._kinds):
            pages = lists[problem.group]
            wrapper = self._wrappers.make_static(
                problem, pages, cu_query_lens=cu_query_lens, is_decode=shape.width == 1
            )
            slot.wrappers[problem] = self._replan(slot, problem, wrapper, pages=pages, shape=shape)
            wrappers[problem] = wrapper
        return StaticPlan(_spans(shape), slots, FlashPlan(lists, wrappers))

    def _room(self, group: int, num_pages: int) -> Tensor:
        """For the lists of all captured forwards: each writes its own before it reads it, and they
        run one after the other. The largest is made first, mostly."""
        if len(self._rooms.get(group, ())) < num_pages:
            self._rooms[group] = self._ints(num_pages)
        return self._rooms[group][:num_pages]

    def _ints(self, num: int) -> Tensor:
        return torch.empty(num, dtype=torch.int32, device=self._site.pools.device)

    def _replan(
        self,
        slot: Slot,
        problem: Problem,
        wrapper: Wrapper,
        *,
        pages: PageList,
        shape: StaticShape,
    ) -> Replan:
        """Of what is in the slot's arrays then; in one call, if the package lets us."""
        query_lens, is_decode = _spans(shape), shape.width == 1

        def fill(lens: ArrayI32) -> Arrays:
            slot.finish()
            return self._write(slot, lens, query_lens)[problem.group]

        # The list is written by the forward itself: there is nothing to copy yet.
        plan = partial(
            self._wrappers.plan,
            *(wrapper, problem, fill(query_lens)),
            pages=pages.pages[:0],
            is_decode=is_decode,
        )
        longest = np.full_like(query_lens, shape.max_len)
        call = call_of_planner(
            wrapper, plan, [partial(fill, lens) for lens in (query_lens, longest)]
        )
        slot.finish()
        if call is None and is_decode and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "this FlashInfer's plan is not to be had in one call: a replayed step is 7 calls "
                "or more longer for each window; 0.6.3 and 0.7.2 have it"
            )
        return call or plan

    def _write(self, slot: Slot, lens: ArrayI32, query_lens: ArrayI32) -> dict[int, Arrays]:
        return write_arrays(
            slot, self._site, lens=lens, query_lens=query_lens, problems=self._kinds
        )


def _spans(shape: StaticShape) -> ArrayI32:
    return np.full(shape.num_rows, shape.width, np.int32)
