"""Attention by this project's Triton kernels, which read page tables and lengths on the device.

The plan only says which kernels run. It is the same for all steps of one shape, so a captured
forward can be replayed without planning again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
    own_plan,
)
from aserve.gpu.attention.latents import has_only_latents
from aserve.gpu.attention.slots import SparseOps
from aserve.gpu.attention.triton_latents import attend_slots, build_latents, score_keys
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import KV_DTYPES
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.dot import IS_INTERPRETED
from aserve_kernels.paged_decode import paged_decode
from aserve_kernels.paged_extend import paged_extend
from aserve_kernels.paged_rows import PagedRows, Scoring, TreeMask
from aserve_kernels.paged_tiles import Chip, KvSplits, fixed_split

FIRST_FP8 = (8, 9)  # the lowest compute capability for which Triton converts fp8


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Whether a forward has decode rows (one query) and prefill rows (more queries)."""

    has_decodes: bool
    has_prefills: bool


class TritonAttention:
    __slots__ = ("_pools", "_splits")
    static_plans = None

    def __init__(self, pools: KvPools, splits: KvSplits) -> None:
        self._pools = pools
        self._splits = splits

    def plan(self, batch: ForwardBatch) -> object:
        is_decode = batch.query_lens_cpu == 1
        return TritonPlan(bool(is_decode.any()), not is_decode.all())

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        own = own_plan(batch, plan, TritonPlan, tree_masks=True)
        tables, tree = self._pools.page_tables, _tree_of(batch)
        groups = tuple(self._rows(batch, table, tree) for table in tables)

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            if q.stride(2) != 1:
                q = q.contiguous()
            out = q.new_empty(q.shape)
            is_causal = layer.mask is Mask.CAUSAL
            scoring = Scoring(
                layer.scale, layer.window, layer.softcap, *kv.scales, is_causal, inputs.sinks
            )
            args = (q, kv.keys, kv.values, groups[kv.group], scoring)
            if own.has_decodes:
                paged_decode(*args, out=out, splits=self._splits)
            if own.has_prefills:
                paged_extend(*args, out=out, splits=self._splits)
            return out

        return attend

    def _rows(self, batch: ForwardBatch, table: Tensor, tree: TreeMask | None) -> PagedRows:
        page_size = self._pools.page_size
        return PagedRows(
            table, page_size, batch.rows, batch.lens, batch.cu_query_lens,
            max_len=table.shape[1] * page_size, tree=tree,
        )  # fmt: skip


def _tree_of(batch: ForwardBatch) -> TreeMask | None:
    if batch.tree_mask is None:
        return None
    query_lens = batch.query_lens.index_select(0, batch.token_to_row)
    return TreeMask.of(batch.tree_mask, query_lens)


def _build(site: AttentionSite) -> AttentionBackend:
    if site.is_deterministic and site.has_tree_masks:
        raise AttentionUnavailable(
            "gives the tokens of a draft tree other bits than those of plain decoding, which "
            "--deterministic does not allow"
        )
    splits = _splits(site)
    if has_only_latents(site):
        return build_latents(site, splits)
    return TritonAttention(site.pools, splits)


def make_sparse_ops(site: AttentionSite) -> SparseOps:
    return SparseOps(partial(attend_slots, splits=_splits(site)), score_keys)


def _splits(site: AttentionSite) -> KvSplits:
    pools = site.pools
    chip = _chip(pools.device, pools.dtype) if pools.device.type == "cuda" else Chip()
    if not site.is_deterministic:
        return KvSplits(chip)
    max_len = pools.page_tables[0].shape[1] * pools.page_size
    return KvSplits(chip, fixed_split=fixed_split(max_len))


def check_kv_dtype(device: torch.device, kv_dtype: torch.dtype) -> None:
    """Raises AttentionUnavailable if the kernel that stores KV cannot be compiled for it."""
    if device.type != "cuda" or kv_dtype.itemsize > 1:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_FP8:
        raise AttentionUnavailable(
            f"needs compute capability {FIRST_FP8} or higher for KV of fp8; this device has "
            f"{capability}"
        )


def _chip(device: torch.device, kv_dtype: torch.dtype) -> Chip:
    check_kv_dtype(device, kv_dtype)
    properties = torch.cuda.get_device_properties(device)
    # The driver reserves 1 KiB of each multiprocessor's shared memory.
    return Chip(
        properties.multi_processor_count, properties.shared_memory_per_multiprocessor - (1 << 10)
    )


KIND = AttentionKind(
    Capabilities(
        devices=frozenset({"cuda", "cpu"} if IS_INTERPRETED.value else {"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset(KV_DTYPES.values()),
        masks=frozenset({Mask.CAUSAL, Mask.NONE}),
        latents=True,
        sinks=True,
        tree_masks=True,
        can_capture=True,
        deterministic=True,
    ),
    _build,
    make_sparse_ops,
)
