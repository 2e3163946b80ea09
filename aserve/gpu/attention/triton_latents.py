"""Attention over latents by this project's Triton kernel, which reads lengths on the device.

For the kernel each token is a row of its own, whose length ends with it. So the plan is nothing,
and a captured forward can be replayed without planning again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionSite, AttentionUnavailable
from aserve.gpu.attention.slots import Chosen
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.kv.pools import KvPools, LayerKv
from aserve.gpu.models.base import Attend
from aserve.gpu.models.indexer import IndexInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.index_scores import index_scores
from aserve_kernels.latent_decode import TokenTrees, latent_decode
from aserve_kernels.paged_rows import PagedRows, Scoring
from aserve_kernels.paged_tiles import KvSplits


class TritonLatents:
    __slots__ = ("_pools", "_splits")
    static_plans = None

    def __init__(self, pools: KvPools, splits: KvSplits) -> None:
        self._pools = pools
        self._splits = splits

    def plan(self, batch: ForwardBatch) -> object:
        return None

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        trees = None
        if batch.tree_mask is not None:
            prefix_lens = batch.kv_lens.index_select(0, batch.token_to_row)
            trees = TokenTrees(batch.tree_mask, prefix_lens)
        lens = batch.cache_positions + 1
        starts = torch.arange(batch.num_tokens + 1, device=lens.device)
        page_size = self._pools.page_size
        tokens = tuple(
            PagedRows(
                table, page_size, batch.token_rows, lens, starts,
                max_len=table.shape[1] * page_size,
            )
            for table in self._pools.page_tables
        )  # fmt: skip

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            if q.stride(2) != 1:
                q = q.contiguous()
            out = q.new_empty((*q.shape[:2], layer.out_dim))
            scale = kv.scales[0]
            scoring = Scoring(layer.scale, None, layer.softcap, key_scale=scale, value_scale=scale)
            latent_decode(
                q, kv.keys, tokens[kv.group], scoring, out=out, splits=self._splits, trees=trees
            )
            return out

        return attend


def build_latents(site: AttentionSite, splits: KvSplits) -> TritonLatents:
    if any(layer.window is not None or layer.mask is not Mask.CAUSAL for layer in site.layers):
        raise AttentionUnavailable("supports latent KV in layers with a plain causal mask only")
    return TritonLatents(site.pools, splits)


def attend_slots(
    q: Tensor, kv: LayerKv, chosen: Chosen, layer: LayerSpec, *, splits: KvSplits
) -> Tensor:
    """The `AttendSlots` of this kernel: each query is a row with pages of one slot."""
    num_tokens, most = chosen.slots.shape
    tokens = torch.arange(num_tokens + 1, device=q.device)
    rows = PagedRows(chosen.slots, 1, tokens[:-1], chosen.lens, tokens, max_len=most)
    out = q.new_empty((*q.shape[:2], layer.out_dim))
    scale = kv.scales[0]
    scoring = Scoring(layer.scale, key_scale=scale, value_scale=scale)
    latent_decode(q.contiguous(), kv.keys, rows, scoring, out=out, splits=splits)
    return out


def score_keys(index: IndexInputs, keys: Tensor, paged: PagedRows) -> Tensor:
    """The `ScoreKeys` of a Triton kernel."""
    return index_scores(index.q, index.weights.to(index.q.dtype).contiguous(), keys, paged)
