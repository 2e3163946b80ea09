"""A step's decision on the device: everything known, nothing shaped for a forward yet.

It knows no model. Made by resolve.py for a step, or here for one more forward within it; never
changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.step.plan import LogitsPlan, StepPlan
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.base import ArrayI32


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the tokens of a forward lie; int64."""

    token_rows: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    slots: tuple[Tensor, ...]  # [tokens] per layer group
    lens: Tensor  # [rows], KV lengths with these tokens
    cu_query_lens: Tensor  # [rows + 1]


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Tensors int64; rows, spans, kv_lens [rows]; input_ids, owners, offsets [tokens]."""

    iteration: int
    rows: Tensor
    query_lens: Tensor
    kv_lens: Tensor  # before this forward, exact
    input_ids: Tensor  # known ids only
    token_to_row: Tensor
    offsets: Tensor
    query_lens_cpu: ArrayI32
    len_bounds_cpu: ArrayI32  # no row is longer after this forward
    is_exact: bool = False  # the bounds are the lengths themselves
    attention_plan: object | None = None  # made before, for a capture
    shared_pages: int = 0  # as the step's ScheduleBatch says
    placed: Placed | None = None  # if whoever made it knows already

    def place(self, pools: KvPools) -> Placed:
        if self.placed is not None:
            return self.placed
        token_rows = self.rows.index_select(0, self.token_to_row)
        positions = self.kv_lens.index_select(0, self.token_to_row).add_(self.offsets)
        groups = range(len(pools.page_tables))
        return Placed(
            token_rows,
            positions,
            slots=tuple(pools.slots(group, token_rows, positions) for group in groups),
            lens=self.kv_lens + self.query_lens,
            cu_query_lens=torch.nn.functional.pad(self.query_lens.cumsum(0), (1, 0)),
        )

    def decode(self, rows: Tensor, *, input_ids: Tensor, kv_lens: Tensor) -> DeviceBatch:
        """One more token for some of these rows, int64 [n] each: a drafter's next forward."""
        num_rows = len(rows)
        bound = int(self.len_bounds_cpu.max(initial=0)) + 1
        return DeviceBatch(
            iteration=self.iteration,
            rows=rows,
            query_lens=torch.ones_like(rows),
            kv_lens=kv_lens,
            input_ids=input_ids,
            token_to_row=torch.arange(num_rows, device=rows.device),
            offsets=torch.zeros_like(rows),
            query_lens_cpu=np.ones(num_rows, np.int32),
            len_bounds_cpu=np.full(num_rows, bound, np.int32),
        )


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step as a decode mode gets it: the resolved batch, the plan, the staged arrays."""

    plan: StepPlan
    batch: DeviceBatch
    arrays: DeviceArrays

    @property
    def iteration(self) -> Tensor:
        """int64 [1]."""
        return self.arrays.ints("iteration")


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A Sample on the device: rows int64 [n] of step `iteration`, int64 [1]; mask int32
    [n, words].
    """

    iteration: Tensor
    rows: Tensor
    mask: Tensor
    logits: LogitsPlan
    arrays: DeviceArrays
