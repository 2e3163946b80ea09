"""Whether a forward's attention is planned already, and for which shape.

It knows no backend: the plan itself is only carried.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.step.inputs import DeviceBatch
from aserve.messages.base import ArrayI32


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """`replan_equivalent`: planning again on another shape would give what was meant. Else the plan
    holds more than the batch says, and must stay."""

    plan: object
    num_rows: int
    num_tokens: int
    replan_equivalent: bool


class PlanMarker:
    """Written by pre-planners, through their ForwardBatch."""

    __slots__ = ("record",)

    def __init__(self, record: PlanRecord | None = None) -> None:
        self.record = record


@dataclass(frozen=True, slots=True)
class ForwardOverrides:
    """What one forward needs and no other: an argument of init_new, so it cannot outlive it."""

    capture: HiddenCapture | None = None
    kv_lens_cpu: ArrayI32 | None = None  # exact lengths before the forward, if the host has them
    rope_positions: Tensor | None = None  # [tokens] or [axes, tokens]; None: the cache positions
    tree_mask: Tensor | None = None  # bool [tokens, >= query_len], as in ForwardBatch


NO_OVERRIDES = ForwardOverrides()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tensors int64. Padding rows come last: row 0, slot 0, one token."""

    iteration: int
    rows: Tensor  # [rows]
    lens: Tensor  # [rows], KV lengths with this forward's tokens
    cu_query_lens: Tensor  # [rows + 1]
    token_to_row: Tensor  # [tokens]
    input_ids: Tensor  # [tokens]
    cache_positions: Tensor  # [tokens], place of each token in its row's KV
    slots: tuple[Tensor, ...]  # [tokens] per layer group
    query_lens_cpu: ArrayI32  # [rows]
    len_bounds_cpu: ArrayI32  # [rows], no length is greater
    lens_cpu: ArrayI32 | None  # [rows], where the host knows them
    capture: HiddenCapture | None
    rope_override: Tensor | None = None  # [tokens], or [axes, tokens] for several rope axes
    # bool [tokens, >= query_len]: which of its row's new tokens a token sees, besides the layer's
    # mask; columns from the row's query_len on are not read
    tree_mask: Tensor | None = None
    shared_pages: int = 0  # all rows have these first pages in common, in the first layer group
    is_debug: bool = False
    marker: PlanMarker = field(default_factory=PlanMarker, compare=False, repr=False)

    @classmethod
    def init_new(
        cls,
        batch: DeviceBatch,
        pools: KvPools,
        overrides: ForwardOverrides = NO_OVERRIDES,
        *,
        is_debug: bool = False,
    ) -> ForwardBatch:
        """Pure: the same arguments give equal tensors, and nothing given is changed."""
        placed = batch.place(pools)
        known = batch.len_bounds_cpu if batch.is_exact else None
        if overrides.kv_lens_cpu is not None:
            known = overrides.kv_lens_cpu + batch.query_lens_cpu
        return cls(
            iteration=batch.iteration,
            rows=batch.rows,
            lens=placed.lens,
            cu_query_lens=placed.cu_query_lens,
            token_to_row=batch.token_to_row,
            input_ids=batch.input_ids,
            cache_positions=placed.positions,
            rope_override=overrides.rope_positions,
            tree_mask=overrides.tree_mask,
            slots=placed.slots,
            query_lens_cpu=batch.query_lens_cpu,
            len_bounds_cpu=batch.len_bounds_cpu,
            lens_cpu=known,
            capture=overrides.capture,
            shared_pages=batch.shared_pages,
            is_debug=is_debug,
        )

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def rope_positions(self) -> Tensor:
        """int64 [tokens] or [axes, tokens]: the cache positions, unless this forward has others."""
        return self.cache_positions if self.rope_override is None else self.rope_override

    @property
    def plan(self) -> object:
        """What the mark carries; only where `needs_attention_plan()` is False."""
        if self.marker.record is None:
            raise BugError(f"step {self.iteration}: nobody planned this forward's attention")
        return self.marker.record.plan

    def mark_attention_planned(self, plan: object, *, replan_equivalent: bool = False) -> None:
        """Only for who plans before the forward runs, capture batches too; again records again."""
        self.marker.record = PlanRecord(plan, self.num_rows, self.num_tokens, replan_equivalent)

    def needs_attention_plan(self) -> bool:
        """Asked after padding."""
        record = self.marker.record
        if record is None:
            return True
        if (record.num_rows, record.num_tokens) == (self.num_rows, self.num_tokens):
            return False
        if not record.replan_equivalent and self.is_debug:
            raise BugError(
                f"step {self.iteration} was planned for {record.num_rows} rows and "
                f"{record.num_tokens} tokens, has {self.num_rows} and {self.num_tokens}, and its "
                "plan cannot be made again"
            )
        return record.replan_equivalent

    def padded(self, num_rows: int) -> ForwardBatch:
        """With padding rows of one token up to `num_rows`. The plan's record comes along."""
        more = num_rows - self.num_rows
        if more == 0:
            return self
        ones = np.ones(more, np.int32)
        pad, rope, tree = torch.nn.functional.pad, self.rope_override, self.tree_mask
        last = torch.arange(self.num_tokens + 1, self.num_tokens + more + 1)
        return dataclasses.replace(
            self,
            rows=pad(self.rows, (0, more)),
            lens=pad(self.lens, (0, more), value=1),
            cu_query_lens=torch.cat((self.cu_query_lens, last.to(self.rows.device))),
            token_to_row=torch.cat(
                (self.token_to_row, torch.arange(self.num_rows, num_rows, device=self.rows.device))
            ),
            input_ids=pad(self.input_ids, (0, more)),
            cache_positions=pad(self.cache_positions, (0, more)),
            rope_override=None if rope is None else pad(rope, (0, more)),
            tree_mask=None if tree is None else pad(tree, (0, 0, 0, more), value=True),
            slots=tuple(pad(slots, (0, more)) for slots in self.slots),
            query_lens_cpu=np.concatenate((self.query_lens_cpu, ones)),
            len_bounds_cpu=np.concatenate((self.len_bounds_cpu, ones)),
            lens_cpu=None if self.lens_cpu is None else np.concatenate((self.lens_cpu, ones)),
            shared_pages=0,
            marker=PlanMarker(self.marker.record),
        )

    def split(self, num_rows: int) -> tuple[ForwardBatch, ForwardBatch]:
        """The first rows and the rest, as two forwards; both start unplanned."""
        num_tokens = int(self.query_lens_cpu[:num_rows].sum())
        return (
            self._part(slice(0, num_rows), slice(0, num_tokens)),
            self._part(slice(num_rows, None), slice(num_tokens, None)),
        )

    def _part(self, rows: slice, tokens: slice) -> ForwardBatch:
        starts = self.cu_query_lens[rows.start : None if rows.stop is None else rows.stop + 1]
        return dataclasses.replace(
            self,
            rows=self.rows[rows],
            lens=self.lens[rows],
            cu_query_lens=starts - tokens.start,
            token_to_row=self.token_to_row[tokens] - rows.start,
            input_ids=self.input_ids[tokens],
            cache_positions=self.cache_positions[tokens],
            rope_override=None if self.rope_override is None else self.rope_override[..., tokens],
            tree_mask=None if self.tree_mask is None else self.tree_mask[tokens],
            slots=tuple(slots[tokens] for slots in self.slots),
            query_lens_cpu=self.query_lens_cpu[rows],
            len_bounds_cpu=self.len_bounds_cpu[rows],
            lens_cpu=None if self.lens_cpu is None else self.lens_cpu[rows],
            marker=PlanMarker(),
        )
