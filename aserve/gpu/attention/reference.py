"""Attention in plain torch, row by row: the oracle that other backends are compared with.

It knows no batch shape that deserves speed. Written: only the keys and values of the forward's own
slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.attention.base import AttentionKind, Capabilities
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.kv.store import KV_DTYPES
from aserve.gpu.layers.rope import RopeInputs
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch


class TorchReference:
    """Each row is computed on its own, so that no neighbour can change it."""

    __slots__ = ("_pools",)
    static_plans = None

    def __init__(self, pools: KvPools) -> None:
        self._pools = pools

    def plan(self, batch: ForwardBatch) -> object:
        return None

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        def attend(layer: LayerSpec, heads: Tensor, rope: RopeInputs | None) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(heads, rope, batch.slots[kv.group])
            out = torch.empty_like(q)
            start = 0
            for row, query_len in enumerate(batch.query_lens_cpu):
                stop = start + int(query_len)
                out[start:stop] = self._attend_row(layer, q[start:stop], batch, row)
                start = stop
            return out

        return attend

    def _attend_row(self, layer: LayerSpec, q: Tensor, batch: ForwardBatch, row: int) -> Tensor:
        """q [span, heads, head_dim] of one row -> like q."""
        kv = self._pools.layers[layer.index]
        kv_positions = torch.arange(int(batch.len_bounds_cpu[row]), device=q.device)
        own_row = batch.rows[row].expand_as(kv_positions)
        positions = batch.lens[row] - len(q) + torch.arange(len(q), device=q.device)
        is_seen = visible(positions, kv_positions, layer.window)
        # What no query sees is read from slot 0: others' NaN would go through the mask.
        slots = self._pools.slots(kv.group, own_row, kv_positions) * is_seen.any(dim=0)
        shared_by = layer.num_heads // layer.num_kv_heads
        keys, values = (
            stored.repeat_interleave(shared_by, dim=1)
            for stored in kv.read(lambda pool: pool[slots], q.dtype)
        )
        scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def visible(positions: Tensor, kv_positions: Tensor, window: int | None) -> Tensor:
    """positions [..., queries], kv_positions [keys] -> bool [..., queries, keys]."""
    distance = positions[..., None] - kv_positions
    is_seen = distance >= 0
    return is_seen if window is None else is_seen & (distance < window)


KIND = AttentionKind(
    Capabilities(kv_dtypes=frozenset(KV_DTYPES.values()), can_capture=True),
    lambda site: TorchReference(site.pools),
)
