"""Attention by our own Triton kernels, which read page tables and lengths where they are.

Nothing is planned but which kernels run, so that one captured forward fits every step of its shape.
It knows no model. Written: only the keys and values of the forward's own slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.attention.base import (
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
    own_plan,
)
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import KV_DTYPES
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.dot import IS_INTERPRETED
from aserve_kernels.paged_decode import paged_decode
from aserve_kernels.paged_extend import paged_extend
from aserve_kernels.paged_rows import PagedRows, Scoring
from aserve_kernels.paged_tiles import Chip, KvSplits, fixed_split

FIRST_FP8 = (8, 9)  # the first compute capability for which Triton converts them


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Which rows a forward has: that is all it takes from the host's values."""

    has_one_query: bool
    has_more_queries: bool


class TritonAttention:
    __slots__ = ("_pools", "_splits")
    static_plans = None

    def __init__(self, pools: KvPools, splits: KvSplits) -> None:
        self._pools = pools
        self._splits = splits

    def plan(self, batch: ForwardBatch) -> object:
        is_one = batch.query_lens_cpu == 1
        return TritonPlan(bool(is_one.any()), not is_one.all())

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        own = own_plan(batch, plan, TritonPlan)
        tables = self._pools.page_tables
        groups = tuple(self._rows(batch, table) for table in tables)

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            if q.stride(2) != 1:
                q = q.contiguous()
            out = q.new_empty(q.shape)
            scoring = Scoring(layer.scale, layer.window, layer.softcap, *kv.scales)
            given = (q, kv.keys, kv.values, groups[kv.group], scoring)
            if own.has_one_query:
                paged_decode(*given, out=out, splits=self._splits)
            if own.has_more_queries:
                paged_extend(*given, out=out, splits=self._splits)
            return out

        return attend

    def _rows(self, batch: ForwardBatch, table: Tensor) -> PagedRows:
        page_size = self._pools.page_size
        return PagedRows(
            table, page_size, batch.rows, batch.lens, batch.cu_query_lens,
            max_len=table.shape[1] * page_size,
        )  # fmt: skip


def _build(site: AttentionSite) -> TritonAttention:
    pools = site.pools
    chip = Chip()
    if pools.device.type == "cuda":
        chip = _chip(pools.device, pools.dtype)
    if not site.is_deterministic:
        return TritonAttention(pools, KvSplits(chip))
    max_len = pools.page_tables[0].shape[1] * pools.page_size
    return TritonAttention(pools, KvSplits(chip, fixed_split=fixed_split(max_len)))


def _chip(device: torch.device, kv_dtype: torch.dtype) -> Chip:
    capability = torch.cuda.get_device_capability(device)
    if kv_dtype.itemsize == 1 and capability < FIRST_FP8:
        raise AttentionUnavailable(
            f"reads KV of fp8 from compute capability {FIRST_FP8} on, and this is {capability}"
        )
    found = torch.cuda.get_device_properties(device)
    # A KiB of a processor's shared memory is the driver's.
    return Chip(found.multi_processor_count, found.shared_memory_per_multiprocessor - (1 << 10))


KIND = AttentionKind(
    Capabilities(
        devices=frozenset({"cuda", "cpu"} if IS_INTERPRETED.value else {"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset(KV_DTYPES.values()),
        can_capture=True,
        deterministic=True,
    ),
    _build,
)
