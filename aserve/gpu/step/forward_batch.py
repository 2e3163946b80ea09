"""`ForwardBatch`: the inputs of one forward on the device, and the record of its attention plan.

`ForwardBatch.init_new` is the only place that turns rows, ids and lengths (`DeviceBatch`) into a
forward's inputs. What one forward changes, it changes in a ForwardBatch of its own.
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
from aserve.gpu.models.vision_language import TokenFeatures
from aserve.messages.base import ArrayI32


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The rows and tokens of one forward, with every id and length known. Tensors are int64."""

    iteration: int
    rows: Tensor  # [rows]
    query_lens: Tensor  # [rows]
    kv_lens: Tensor  # [rows], exact KV lengths before this forward
    input_ids: Tensor  # [tokens], no placeholders
    token_to_row: Tensor  # [tokens], index into rows
    offsets: Tensor  # [tokens], index of the token among its row's queries
    query_lens_cpu: ArrayI32  # [rows]
    len_bounds_cpu: ArrayI32  # [rows], upper bounds of the KV lengths after this forward
    is_exact: bool = False  # len_bounds_cpu are the lengths themselves
    attention_plan: object | None = None  # made before the forward, for a graph capture
    shared_pages: int = 0  # as in ScheduleBatch


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The attention plan of a forward, and the shape that it was made for.

    With `replan_equivalent` a plan for another shape can simply be made again. Without it the plan
    holds more than the batch says, and must stay.
    """

    plan: object
    num_rows: int
    num_tokens: int
    replan_equivalent: bool


class PlanMarker:
    """Holds the PlanRecord. Written through `ForwardBatch.mark_attention_planned` only."""

    __slots__ = ("record",)

    def __init__(self, record: PlanRecord | None = None) -> None:
        self.record = record


@dataclass(frozen=True, slots=True)
class ForwardOverrides:
    """Inputs that one forward needs and no other."""

    capture: HiddenCapture | None = None
    kv_lens_cpu: ArrayI32 | None = None  # exact lengths before the forward, if the host has them
    rope_positions: Tensor | None = None  # [tokens] or [axes, tokens]; None: the cache positions
    tree_mask: Tensor | None = None  # bool [tokens, >= query_len], as in ForwardBatch


NO_OVERRIDES = ForwardOverrides()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The inputs of one forward. Tensors are int64. Padding rows come last: row 0, slot 0, one
    token each."""

    iteration: int
    rows: Tensor  # [rows]
    query_lens: Tensor  # [rows]
    kv_lens: Tensor  # [rows], KV lengths before this forward
    lens: Tensor  # [rows], KV lengths with this forward's tokens
    cu_query_lens: Tensor  # [rows + 1]
    token_to_row: Tensor  # [tokens], index into rows
    token_rows: Tensor  # [tokens], row numbers
    input_ids: Tensor  # [tokens]
    cache_positions: Tensor  # [tokens], position of each token in its row's KV
    slots: tuple[Tensor, ...]  # [tokens] per layer group
    query_lens_cpu: ArrayI32  # [rows]
    len_bounds_cpu: ArrayI32  # [rows], upper bounds of `lens`
    lens_cpu: ArrayI32 | None  # [rows], `lens` where the host knows them
    capture: HiddenCapture | None
    rope_override: Tensor | None = None  # [tokens], or [axes, tokens] for several rope axes
    # bool [tokens, >= query_len]: which of its row's new tokens a token sees, besides the layer's
    # mask; columns from the row's query_len on are not read
    tree_mask: Tensor | None = None
    features: TokenFeatures | None = None  # of tokens of pictures
    shared_pages: int = 0  # all rows share their first pages of the first layer group
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
        """Finds positions and KV slots. Pure: equal arguments give equal tensors, and no argument
        is changed."""
        token_rows = batch.rows.index_select(0, batch.token_to_row)
        positions = batch.kv_lens.index_select(0, batch.token_to_row).add_(batch.offsets)
        groups = range(len(pools.page_tables))
        made = cls.from_slots(
            batch,
            token_rows=token_rows,
            positions=positions,
            slots=tuple(pools.slots(group, token_rows, positions) for group in groups),
            lens=batch.kv_lens + batch.query_lens,
            cu_query_lens=torch.nn.functional.pad(batch.query_lens.cumsum(0), (1, 0)),
        )
        return made.overridden(overrides, is_debug=is_debug)

    @classmethod
    def from_slots(
        cls,
        batch: DeviceBatch,
        *,
        token_rows: Tensor,
        positions: Tensor,
        slots: tuple[Tensor, ...],
        lens: Tensor,
        cu_query_lens: Tensor,
    ) -> ForwardBatch:
        """Builds the batch from tensors that a device's kernel computed in place of `init_new`."""
        made = cls(
            iteration=batch.iteration,
            rows=batch.rows,
            query_lens=batch.query_lens,
            kv_lens=batch.kv_lens,
            lens=lens,
            cu_query_lens=cu_query_lens,
            token_to_row=batch.token_to_row,
            token_rows=token_rows,
            input_ids=batch.input_ids,
            cache_positions=positions,
            slots=slots,
            query_lens_cpu=batch.query_lens_cpu,
            len_bounds_cpu=batch.len_bounds_cpu,
            lens_cpu=batch.len_bounds_cpu if batch.is_exact else None,
            capture=None,
            shared_pages=batch.shared_pages,
        )
        if batch.attention_plan is not None:
            made.mark_attention_planned(batch.attention_plan)
        return made

    def overridden(self, overrides: ForwardOverrides, *, is_debug: bool = False) -> ForwardBatch:
        """Returns this forward with other settings. The attention plan's record comes along."""
        if overrides is NO_OVERRIDES and is_debug == self.is_debug:
            return self
        lens_cpu, rope = self.lens_cpu, overrides.rope_positions
        own_rope = self.rope_override if self.tree_mask is None else None  # a tree's go with it
        if overrides.kv_lens_cpu is not None:
            lens_cpu = overrides.kv_lens_cpu + self.query_lens_cpu
        return dataclasses.replace(
            self,
            lens_cpu=lens_cpu,
            capture=overrides.capture,
            rope_override=own_rope if rope is None else rope,
            tree_mask=overrides.tree_mask,
            is_debug=is_debug,
            marker=PlanMarker(self.marker.record),
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
    def token_positions(self) -> Tensor:
        """int64 [tokens], each token's position in its sequence. In a draft tree that is not its
        position in the row's KV."""
        return self.cache_positions if self.tree_mask is None else self.rope_positions

    @property
    def plan(self) -> object:
        """The recorded attention plan. Valid only if `needs_attention_plan()` is False."""
        if self.marker.record is None:
            raise BugError(f"step {self.iteration}: nobody planned this forward's attention")
        return self.marker.record.plan

    def mark_attention_planned(self, plan: object, *, replan_equivalent: bool = False) -> None:
        """Called only by code that plans before the forward runs, as a graph capture does. A second
        call replaces the record."""
        self.marker.record = PlanRecord(plan, self.num_rows, self.num_tokens, replan_equivalent)

    def needs_attention_plan(self) -> bool:
        """Returns whether attention must plan this forward. Ask after padding."""
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
        """Returns this forward with padding rows of one token, up to `num_rows` rows. The attention
        plan's record comes along.
        """
        more = num_rows - self.num_rows
        if more == 0:
            return self
        ones = np.ones(more, np.int32)
        pad, rope, tree = torch.nn.functional.pad, self.rope_override, self.tree_mask
        last = torch.arange(self.num_tokens + 1, self.num_tokens + more + 1)
        return dataclasses.replace(
            self,
            rows=pad(self.rows, (0, more)),
            query_lens=pad(self.query_lens, (0, more), value=1),
            kv_lens=pad(self.kv_lens, (0, more)),
            lens=pad(self.lens, (0, more), value=1),
            cu_query_lens=torch.cat((self.cu_query_lens, last.to(self.rows.device))),
            token_to_row=torch.cat(
                (self.token_to_row, torch.arange(self.num_rows, num_rows, device=self.rows.device))
            ),
            token_rows=pad(self.token_rows, (0, more)),
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
