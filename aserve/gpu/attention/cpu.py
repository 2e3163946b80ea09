"""Attention by a compiled kernel that reads the page table where it is: the default on the CPU.

Rows of many queries may go another way. It knows no model. Written: only the keys and values of the
forward's own slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionKind, AttentionSite, Capabilities, own_plan
from aserve.gpu.attention.chunked_prefill import AttendRows, ChunkedPrefill, choose_chunked_prefill
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.cpu.paged_attention import compile_paged_attention, paged_attention
from aserve_kernels.paged_rows import Scoring

Bools: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a forward, per layer group, and how they attend."""

    attend: AttendRows
    rows: tuple[HostRows, ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """`split` has rows of many queries apart. `longest` is the most keys of one, where their way
    knows no windows and no soft caps."""

    every: tuple[Part, ...]
    split: tuple[Part, ...]
    longest: int | None = None

    def parts(self, layer: LayerSpec) -> tuple[Part, ...]:
        if self.longest is None:
            return self.split
        sees_all = layer.window is None or layer.window >= self.longest
        return self.split if sees_all and layer.softcap is None else self.every


class PagedCpu:
    __slots__ = ("_few", "_many", "_pools", "_tables")
    static_plans = None

    def __init__(self, pools: KvPools, many: ChunkedPrefill | None) -> None:
        """`many` is how rows of many queries attend, if not as all others do."""
        self._pools = pools
        self._many = many
        self._tables = tuple(table.numpy() for table in pools.page_tables)
        num_workers = torch.get_num_threads()
        compile_paged_attention(pools.dtype, num_workers)
        self._few = partial(paged_attention, num_workers=num_workers)

    def plan(self, batch: ForwardBatch) -> object:
        query_lens = batch.query_lens_cpu.astype(np.int64)
        lens, starts = batch.lens.numpy(), batch.cu_query_lens.numpy()[:-1]
        rows = batch.rows.numpy()

        def part(attend: AttendRows, which: Bools) -> tuple[Part, ...]:
            if not which.any():
                return ()
            own = QueryRows(rows[which], lens[which], starts[which], query_lens[which])
            page_size = self._pools.page_size
            by_group = tuple(HostRows(table, page_size, own) for table in self._tables)
            return (Part(attend, by_group),)

        every = part(self._few, np.ones(len(query_lens), np.bool_))
        if self._many is None:
            return CpuPlan(every, every)
        is_many = (query_lens >= self._many.least) & (lens >= self._many.least_keys)
        split = part(self._few, ~is_many) + part(self._many.attend, is_many)
        longest = None if self._many.hides else int(lens[is_many].max(initial=0))
        return CpuPlan(every, split, longest)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:

        own = own_plan(batch, plan, CpuPlan)

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            out = torch.empty(q.shape, dtype=q.dtype)
            scoring = Scoring(layer.scale, layer.window, layer.softcap)
            for part in own.parts(layer):
                rows = part.rows[kv.group]
                part.attend(q, kv.keys, kv.values, rows, scoring, out=out)
            return out

        return attend


def _build(site: AttentionSite) -> PagedCpu:
    """One kernel gives a token the same bits in any step; two do not."""
    if site.is_deterministic:
        return PagedCpu(site.pools, None)
    return PagedCpu(site.pools, choose_chunked_prefill(site.pools, torch.get_num_threads()))


KIND = AttentionKind(
    Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        deterministic=True,
    ),
    _build,
)
