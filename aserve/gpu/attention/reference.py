"""Attention in plain torch, row by row: the reference that other backends are tested against.

For each query of a row, over the keys that the mask admits:

    score_k = scale * q . k                 or softcap * tanh(scale * q . k / softcap)
    out     = sum_k softmax(score)_k v_k    a sink of the head joins the softmax, without a value

It supports every mask, window, soft cap, KV layout and tree mask, and is not meant to be fast.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionKind, Capabilities
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import KV_DTYPES
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve_kernels.paged_rows import softmax_with_sinks


class TorchReference:
    """Rows are computed separately, so that no row can influence another one."""

    __slots__ = ("_pools",)
    static_plans = None

    def __init__(self, pools: KvPools) -> None:
        self._pools = pools

    def plan(self, batch: ForwardBatch) -> object:
        return None

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            out = q.new_empty((len(q), layer.num_heads, layer.out_dim))
            start = 0
            for row, query_len in enumerate(batch.query_lens_cpu):
                tokens = slice(start, start + int(query_len))
                own = q[tokens]
                out[tokens] = self._attend_row(layer, own, batch, row, tokens, inputs.sinks)
                start = tokens.stop
            return out

        return attend

    def _attend_row(
        self,
        layer: LayerSpec,
        q: Tensor,
        batch: ForwardBatch,
        row: int,
        tokens: slice,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [query_len, num_heads, head_dim] of one row -> [query_len, num_heads, out_dim]."""
        kv = self._pools.layers[layer.index]
        kv_positions = torch.arange(int(batch.len_bounds_cpu[row]), device=q.device)
        own_row = batch.rows[row].expand_as(kv_positions)
        kv_len, offsets = batch.lens[row], torch.arange(len(q), device=q.device)
        if batch.tree_mask is None:
            is_seen = _visible_in(layer, kv_len - len(q) + offsets, kv_positions)
        else:
            tree = batch.tree_mask[tokens, : len(q)]
            is_seen = _visible_in_tree(layer, tree, kv_positions, kv_len - len(q))
        is_seen = is_seen & (kv_positions < kv_len)
        # Slots that no query sees are read as slot 0: their NaN would pass through the mask.
        slots = self._pools.slots(kv.group, own_row, kv_positions) * is_seen.any(dim=0)
        heads_per_kv = layer.num_heads // layer.num_kv_heads
        keys, values = (
            stored.repeat_interleave(heads_per_kv, dim=1)
            for stored in kv.read(lambda pool: pool[slots], q.dtype)
        )
        scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weights = softmax_with_sinks(scores.masked_fill(~is_seen, -torch.inf), sinks)
        return torch.einsum("hqk,khd->qhd", weights, values)


def visible(
    positions: Tensor,
    kv_positions: Tensor,
    window: int | None,
    *,
    mask: Mask = Mask.CAUSAL,
    block_len: int = 1,
) -> Tensor:
    """Returns the keys that the mask and the window admit for each query.

    positions int64 [..., queries], kv_positions int64 [keys] -> bool [..., queries, keys].
    """
    queries = positions[..., None]
    match mask:
        case Mask.CAUSAL:
            is_seen = kv_positions <= queries
        case Mask.BLOCK_CAUSAL:
            is_seen = kv_positions // block_len <= queries // block_len
        case Mask.NONE:
            is_seen = torch.ones_like(kv_positions, dtype=torch.bool).expand(
                *positions.shape, len(kv_positions)
            )
        case _:
            assert_never(mask)
    if window is None:
        return is_seen
    return is_seen & ((queries - kv_positions).abs() < window)


def _visible_in(layer: LayerSpec, positions: Tensor, kv_positions: Tensor) -> Tensor:
    return visible(
        positions, kv_positions, layer.window, mask=layer.mask, block_len=layer.block_len
    )


def _visible_in_tree(
    layer: LayerSpec, tree: Tensor, kv_positions: Tensor, prefix_len: Tensor
) -> Tensor:
    """The same for queries that form a draft tree. tree bool [queries, queries]: a token sees its
    ancestors and itself. For masks and windows, a token's position is its depth in the tree behind
    the prefix, not its place in the cache."""
    depths = tree.sum(dim=1) - 1
    new_indices = kv_positions - prefix_len  # of keys among this forward's tokens
    index = new_indices.clamp(0, len(tree) - 1)
    is_old = new_indices < 0
    logical = torch.where(is_old, kv_positions, prefix_len + depths[index])
    is_seen = _visible_in(layer, prefix_len + depths, logical)
    return is_seen & (is_old | tree.index_select(1, index))


KIND = AttentionKind(
    Capabilities(
        kv_dtypes=frozenset(KV_DTYPES.values()),
        masks=frozenset(Mask),
        sinks=True,
        latents=True,
        tree_masks=True,
        can_capture=True,
    ),
    lambda site: TorchReference(site.pools),
)
