"""The default backend on the CPU: the kernels of cpu.py, for layers with and without a causal mask.

Without a causal mask every query of a row sees what the row's last query sees. So each query is a
row of its own for the kernel, a decode with the length of its row. A step of whole prompts, which
are all that an encoder has, reads and writes no pages at all: torch attends within each prompt.

PERF: the queries of such a row do not share the tiles of its keys. 8 rows with blocks of 8 queries
in 2 layers of the bundled drafter take 2 ms a forward, against 5 to 10 ms of the torch reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
    own_plan,
)
from aserve.gpu.attention.chunked_prefill import choose_chunked_prefill
from aserve.gpu.attention.cpu import PagedCpu
from aserve.gpu.attention.latents import has_only_latents
from aserve.gpu.attention.slots import Chosen, SparseOps
from aserve.gpu.device.cpu.kernels import compile_kernels_for_kv
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.kv.pools import KvPools, LayerKv
from aserve.gpu.kv.store import FP8, kv_dtype_name
from aserve.gpu.models.base import Attend
from aserve.gpu.models.indexer import IndexInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.cpu.index_scores import compile_index_scores, index_scores
from aserve_kernels.cpu.latent_attention import latent_attention
from aserve_kernels.cpu.paged_attention import paged_attention
from aserve_kernels.paged_rows import PagedRows, Scoring


@dataclass(frozen=True, slots=True)
class MaskedPlan:
    causal: object  # of the backend for layers with a causal mask
    unmasked: tuple[HostRows, ...]  # per layer group
    prompt_lens: tuple[int, ...] | None  # of a step in which every row is a whole prompt


class UnmaskedCpu:
    """Computes layers without a causal mask, and leaves the others to `causal`."""

    __slots__ = ("_attend", "_causal", "_pools", "_tables")
    static_plans = None

    def __init__(self, pools: KvPools, causal: AttentionBackend) -> None:
        self._pools = pools
        self._causal = causal
        self._tables = tuple(table.numpy() for table in pools.page_tables)
        self._attend = partial(paged_attention, num_workers=torch.get_num_threads())

    def plan(self, batch: ForwardBatch) -> object:
        of_token = batch.token_to_row.numpy()
        tokens = np.arange(len(of_token))
        queries = QueryRows(
            batch.rows.numpy()[of_token], batch.lens.numpy()[of_token], tokens, np.ones_like(tokens)
        )
        page_size = self._pools.page_size
        unmasked = tuple(HostRows(table, page_size, queries) for table in self._tables)
        query_lens = batch.query_lens_cpu
        is_whole = np.array_equal(query_lens, batch.len_bounds_cpu)
        lens = tuple(map(int, query_lens)) if is_whole else None
        return MaskedPlan(self._causal.plan(batch), unmasked, lens)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        own = own_plan(batch, plan, MaskedPlan)
        attend_causal = self._causal.bind(batch, own.causal)

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            if layer.mask is Mask.CAUSAL:
                return attend_causal(layer, inputs)
            if own.prompt_lens is not None and _is_plain(layer, inputs):
                return _attend_whole(layer, inputs.heads, own.prompt_lens)
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            out = torch.empty(q.shape, dtype=q.dtype)
            scoring = Scoring(layer.scale, None, layer.softcap, *kv.scales, sinks=inputs.sinks)
            self._attend(q, kv.keys, kv.values, own.unmasked[kv.group], scoring, out=out)
            return out

        return attend


def _is_plain(layer: LayerSpec, inputs: AttentionInputs) -> bool:
    """Whether keys are used as they are given, and the scores as they are computed."""
    is_even = layer.num_heads == layer.num_kv_heads
    has_scores = layer.softcap is None and inputs.sinks is None
    return is_even and has_scores and inputs.rope is None


def _attend_whole(layer: LayerSpec, heads: Tensor, prompt_lens: tuple[int, ...]) -> Tensor:
    """heads [tokens, q + k + v, head_dim] of whole prompts, one behind the other -> [tokens,
    num_heads, head_dim]. NOTE: nothing is stored, because no later step has tokens of these rows.

    PERF: texts of 200 tokens in all-MiniLM-L6-v2 take 0.6 times as long as by the pages.
    """
    out = heads.new_empty(len(heads), layer.num_heads, layer.head_dim)
    for part, own in zip(heads.split(prompt_lens), out.split(prompt_lens), strict=True):
        q, k, v = part.transpose(0, 1).unsqueeze(0).chunk(3, dim=1)
        attended = scaled_dot_product_attention(q, k, v, scale=layer.scale)
        own.copy_(attended[0].transpose(0, 1))
    return out


def _build(site: AttentionSite) -> AttentionBackend:
    """With --deterministic all rows use one kernel, because the two round differently."""
    prefill, has_latents = None, has_only_latents(site)
    if not site.is_deterministic and not has_latents:
        prefill = choose_chunked_prefill(site.pools, site.dtype, torch.get_num_threads())
    if has_latents and site.pools.dtype != site.dtype:
        raise AttentionUnavailable(f"has no latents of {kv_dtype_name(site.pools.dtype)}")
    if site.pools.dtype != site.dtype:
        compile_kernels_for_kv(site.dtype, site.pools.dtype)
    causal = PagedCpu(site.pools, prefill, has_latents=has_latents, dtype=site.dtype)
    unmasked = [layer for layer in site.layers if layer.mask is Mask.NONE]
    if unmasked and has_latents:
        raise AttentionUnavailable("supports latent KV in layers with a causal mask only")
    if any(layer.window is not None for layer in unmasked):
        raise AttentionUnavailable("has no windows in layers without a causal mask")
    return UnmaskedCpu(site.pools, causal) if unmasked else causal


def _make_sparse_ops(site: AttentionSite) -> SparseOps:
    """The kernel of paged latents, to which each query is a row with pages of one slot, and that of
    index scores."""
    num_workers = torch.get_num_threads()
    compile_index_scores(site.dtype, num_workers)

    def attend_slots(q: Tensor, kv: LayerKv, chosen: Chosen, layer: LayerSpec) -> Tensor:
        tokens = np.arange(len(q))
        queries = QueryRows(tokens, chosen.lens.numpy(), tokens, np.ones_like(tokens))
        rows = HostRows(chosen.slots.numpy(), 1, queries)
        out = torch.empty((*q.shape[:2], layer.out_dim), dtype=q.dtype)
        scoring = Scoring(layer.scale)
        latent_attention(q, kv.keys, kv.values, rows, scoring, out=out, num_workers=num_workers)
        return out

    def score_keys(index: IndexInputs, keys: Tensor, paged: PagedRows) -> Tensor:
        return index_scores(index.q, index.weights, keys, paged, num_workers=num_workers)

    return SparseOps(attend_slots, score_keys)


KIND = AttentionKind(
    Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        kv_dtypes=frozenset({FP8, torch.bfloat16}),
        masks=frozenset({Mask.CAUSAL, Mask.NONE}),
        latents=True,
        sinks=True,
        tree_masks=True,
        deterministic=True,
    ),
    _build,
    _make_sparse_ops,
)
