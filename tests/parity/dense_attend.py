"""Attention without pages: the whole history of one sequence as plain tensors, for tests of models.

Calling it appends the tokens' keys and values to their layer's history and attends to all of it, so
that a prompt may come whole or in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.kv.store import RopeAndStoreKv, rope_then_store_kv
from aserve.gpu.models.base import CausalModel


class DenseAttend:
    def __init__(self, store: RopeAndStoreKv = rope_then_store_kv) -> None:
        self._store = store
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.hidden_position: int | None = None  # as if the KV of that token were lost

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
        heads = inputs.heads
        k, v = heads.new_empty((2, len(heads), layer.num_kv_heads, layer.head_dim))
        slots = torch.arange(len(heads), device=heads.device)
        q = self._store(heads, inputs.rope, slots, (k, v), (1.0, 1.0))
        keys = self.keys[layer.index] = _appended(self.keys.get(layer.index), k)
        values = self.values[layer.index] = _appended(self.values.get(layer.index), v)
        repeats = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(repeats, dim=1))
        scores = scores * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weights = scores.masked_fill(~self._visible(layer, len(q), len(keys)), -torch.inf)
        return torch.einsum(
            "hqk,khd->qhd", weights.softmax(-1), values.repeat_interleave(repeats, dim=1)
        )

    def _visible(self, layer: LayerSpec, num_queries: int, num_keys: int) -> Tensor:
        """bool [queries, keys]."""
        query = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        key = torch.arange(num_keys)
        visible = key <= query
        if layer.window is not None:
            visible &= key > query - layer.window
        if self.hidden_position is not None:
            visible &= (key != self.hidden_position) | (key == query)
        return visible


@torch.inference_mode()
def logits_of(
    model: CausalModel,
    tokens: Tensor,
    *,
    chunks: list[int] | None = None,
    lost: int | None = None,
) -> Tensor:
    """float [tokens, vocab] of a sequence that comes in chunks; the KV at `lost` is not there."""
    attend = DenseAttend()
    attend.hidden_position = lost
    sizes = chunks or [len(tokens)]
    parts = zip(tokens.split(sizes), torch.arange(len(tokens)).split(sizes), strict=True)
    return torch.cat([model.logits(model.forward(ids, at, attend)) for ids, at in parts])


def _appended(history: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if history is None else torch.cat((history, new))
