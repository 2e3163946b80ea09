"""The head of a step on the device: row tables and page tables, then ids and lengths, then the
token pool. The result is the `DeviceStep` that a decode mode gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sampling.params import RowTables, init_columns
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch
from aserve.gpu.step.future_map import SEQ_LEN, FutureMap
from aserve.gpu.step.kv_streams import KvStreams
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.state_checkpoints import StateCheckpoints
from aserve.gpu.transfer.staging import DeviceArrays, HostArrays
from aserve.messages.base import array_i32
from aserve.messages.step import ScheduleBatch
from aserve_kernels.delta_rule import DeltaStates

DRAFTS = "drafts"  # the relay field of modes that verify, of shape [max drafts]


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The tables that live as long as the engine. Written on the executor's stream only."""

    pools: KvPools
    tables: RowTables
    relay: FutureMap
    # Attention reads whole pages and masks the part behind a row's length, so a page must be
    # cleared before its new owner uses it: a NaN of the former owner would pass the mask.
    clears_pages: bool = True
    draft_pools: KvPools | None = None  # the drafter's keys and values, over the same page tables
    kv_streams: KvStreams = field(default_factory=KvStreams)
    recurrent: Mapping[int, DeltaStates] = field(default_factory=dict)  # by layer
    checkpoints: StateCheckpoints = field(default_factory=StateCheckpoints)

    @property
    def cleared_pools(self) -> tuple[KvPools, ...]:
        """The pools whose new pages are cleared. A drafter does not write the KV of tokens that
        were made without it, and reads it."""
        own = (self.pools,) if self.clears_pages else ()
        return own if self.draft_pools is None else (*own, self.draft_pools)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The argument of a decode mode: one step's plan, its arrays on the device, and its forward."""

    plan: StepPlan
    arrays: DeviceArrays
    batch: ForwardBatch

    @property
    def iteration(self) -> Tensor:
        """int64 [1]."""
        return self.arrays.ints("iteration")


def stage_tables(batch: ScheduleBatch, arrays: HostArrays, state: DeviceState) -> None:
    """Adds the arrays that `apply_tables` reads. Most decode steps need none."""
    if batch.row_inits:
        ints, floats = init_columns(batch.row_inits, state.tables.shares)
        arrays.add("init_rows", np.array([init.row for init in batch.row_inits], np.int32))
        arrays.add_wide("init_ints", ints)
        arrays.add_wide("init_floats", floats)
        state.tables.texts.stage(batch.row_inits, arrays)
    for group, writes in enumerate(batch.page_writes):
        if not writes.rows:
            continue
        rows, columns, pages = map(array_i32, (writes.rows, writes.columns, writes.pages))
        arrays.add(f"page_writes{group}", np.concatenate((rows, columns, pages)))
        if state.cleared_pools:
            step_rows = array_i32(batch.rows)
            kv_lens = np.zeros(1 + int(step_rows.max()), np.int32)
            kv_lens[step_rows] = array_i32(batch.kv_lens)
            is_empty = columns * state.pools.page_size >= kv_lens[rows]
            arrays.add(f"empty_pages{group}", pages[is_empty])


def apply_tables(batch: ScheduleBatch, arrays: DeviceArrays, state: DeviceState) -> None:
    """Writes the parameters of new requests, and the page-table entries of this step."""
    if batch.row_inits:
        rows = arrays.ints("init_rows")
        ints, floats = arrays.wide_ints("init_ints"), arrays.floats("init_floats")
        state.tables.write(rows, ints=ints, floats=floats)
        state.tables.texts.write(rows, arrays)
        state.relay.forget(rows)
        state.pools.forget(rows)
    pools = state.pools
    for group, writes in enumerate(batch.page_writes):
        if not writes.rows:
            continue
        rows, columns, pages = arrays.ints(f"page_writes{group}").chunk(3)
        pools.write_pages(group, rows=rows, columns=columns, pages=pages)
        for each in state.cleared_pools:
            each.clear(group, arrays.ints(f"empty_pages{group}"))


# How a device runs `resolve`.
Resolve: TypeAlias = Callable[[StepPlan, DeviceArrays, DeviceState], DeviceStep]


def resolve(plan: StepPlan, arrays: DeviceArrays, state: DeviceState) -> DeviceStep:
    """Replaces placeholders by token ids and bounds by lengths, and writes the ids to the token
    pool."""
    input_ids = state.relay.resolve(arrays.ints("input_ids"))
    if plan.num_drafts.any():
        input_ids = _with_drafts(input_ids, arrays, state.relay)
    kv_lens = exact_kv_lens(arrays, state.relay)
    batch = ForwardBatch.init_new(
        resolved_batch(plan, arrays, input_ids=input_ids, kv_lens=kv_lens), state.pools
    )
    state.pools.token_pool.index_copy_(0, batch.slots[0], input_ids.to(torch.int32))
    return DeviceStep(plan, arrays, batch)


def resolved_batch(
    plan: StepPlan, arrays: DeviceArrays, *, input_ids: Tensor, kv_lens: Tensor
) -> DeviceBatch:
    """input_ids int64 [tokens] without placeholders, kv_lens int64 [rows] without bounds."""
    return DeviceBatch(
        iteration=plan.iteration,
        rows=arrays.ints("rows"),
        query_lens=arrays.ints("query_lens"),
        kv_lens=kv_lens,
        input_ids=input_ids,
        token_to_row=arrays.ints("token_to_row"),
        offsets=arrays.ints("offsets"),
        query_lens_cpu=plan.query_lens,
        len_bounds_cpu=plan.len_bounds,
        is_exact=plan.is_exact,
        attention_plan=plan.attention_plan,
        shared_pages=plan.batch.shared_pages,
    )


def exact_kv_lens(arrays: DeviceArrays, relay: FutureMap) -> Tensor:
    """[rows], KV lengths before the step. An exact length comes from the host; only a bound is
    replaced by the published length."""
    kv_lens = arrays.ints("kv_lens")
    if SEQ_LEN not in relay:
        return kv_lens
    published = relay.read(SEQ_LEN, arrays.ints("rows"))
    return torch.where(arrays.ints("is_bound") > 0, published, kv_lens)


def _with_drafts(input_ids: Tensor, arrays: DeviceArrays, relay: FutureMap) -> Tensor:
    """The last `num_drafts` tokens of each row are its drafts, in order."""
    token_to_row = arrays.ints("token_to_row")
    num_known = arrays.ints("query_lens") - arrays.ints("num_drafts")
    numbers = arrays.ints("offsets") - num_known.index_select(0, token_to_row)
    drafts = relay.read(DRAFTS, arrays.ints("rows").index_select(0, token_to_row))
    column = numbers.clamp(min=0)[:, None]
    return torch.where(numbers >= 0, drafts.gather(1, column)[:, 0], input_ids)
