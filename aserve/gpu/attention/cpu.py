"""Attention on the CPU by a compiled kernel that reads keys and values through the page table.

Rows with many queries may use a second kernel, which is faster for
them (chunked_prefill.py); `plan` splits the rows of a forward between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.attention.base import own_plan
from aserve.gpu.attention.chunked_prefill import AttendRows, ChunkedPrefill
from aserve.gpu.attention.cpu_trees import Bools, node_rows, rows_with_trees
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.cpu.latent_attention import compile_latent_attention, latent_attention
from aserve_kernels.cpu.paged_attention import compile_paged_attention, paged_attention
from aserve_kernels.paged_rows import Scoring


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a forward, and the kernel that they use."""

    attend: AttendRows
    rows: tuple[HostRows, ...]  # per layer group


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """`split` computes rows with many queries by the prefill kernel, which has no sinks; `unsplit`
    computes all rows by the general one. `max_prefill_len` is the longest KV length of a prefill
    row, or None if the prefill kernel supports windows and soft caps."""

    unsplit: tuple[Part, ...]
    split: tuple[Part, ...]
    max_prefill_len: int | None = None

    def parts(self, layer: LayerSpec) -> tuple[Part, ...]:
        if layer.has_sinks:
            return self.unsplit
        if self.max_prefill_len is None:
            return self.split
        sees_all = layer.window is None or layer.window >= self.max_prefill_len
        return self.split if sees_all and layer.softcap is None else self.unsplit


class PagedCpu:
    __slots__ = ("_attend", "_pools", "_prefill", "_tables")
    static_plans = None

    def __init__(
        self,
        pools: KvPools,
        prefill: ChunkedPrefill | None,
        *,
        has_latents: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`prefill` computes rows with many queries; without it all rows use the same kernel.
        dtype: that of queries; None: that of KV."""
        self._pools = pools
        self._prefill = prefill
        self._tables = tuple(table.numpy() for table in pools.page_tables)
        num_workers = torch.get_num_threads()
        if has_latents:
            compile_latent_attention(pools.dtype, num_workers)
            attend = latent_attention
        else:
            compile_paged_attention(dtype or pools.dtype, num_workers, pools.dtype)
            attend = paged_attention
        self._attend = partial(attend, num_workers=num_workers)

    def plan(self, batch: ForwardBatch) -> object:
        query_lens = batch.query_lens_cpu.astype(np.int64)
        lens, starts = batch.lens.numpy(), batch.cu_query_lens.numpy()[:-1]
        rows = batch.rows.numpy()
        is_tree = rows_with_trees(batch, query_lens)
        trees: tuple[Part, ...] = ()
        if is_tree.any():
            nodes = node_rows(batch, is_tree, self._tables, self._pools.page_size)
            trees = (Part(self._attend, nodes),)

        def part(attend: AttendRows, which: Bools) -> tuple[Part, ...]:
            which = which & ~is_tree
            if not which.any():
                return ()
            own = QueryRows(rows[which], lens[which], starts[which], query_lens[which])
            page_size = self._pools.page_size
            by_group = tuple(HostRows(table, page_size, own) for table in self._tables)
            return (Part(attend, by_group),)

        unsplit = trees + part(self._attend, np.ones(len(query_lens), np.bool_))
        prefill = self._prefill
        if prefill is None:
            return CpuPlan(unsplit, unsplit)
        is_prefill = (query_lens >= prefill.min_queries) & (lens >= prefill.min_keys)
        split = trees + part(self._attend, ~is_prefill) + part(prefill.attend, is_prefill)
        longest = None if prefill.has_windows_and_caps else int(lens[is_prefill].max(initial=0))
        return CpuPlan(unsplit, split, longest)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:

        own = own_plan(batch, plan, CpuPlan, tree_masks=True)

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            out = torch.empty((*q.shape[:2], layer.out_dim), dtype=q.dtype)
            scoring = Scoring(
                layer.scale, layer.window, layer.softcap, *kv.scales, sinks=inputs.sinks
            )
            for part in own.parts(layer):
                rows = part.rows[kv.group]
                part.attend(q, kv.keys, kv.values, rows, scoring, out=out)
            return out

        return attend
