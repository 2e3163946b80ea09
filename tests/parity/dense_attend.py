"""Attention without pages: the whole history of one sequence as plain tensors, for tests of models.

Calling it appends the tokens' keys and values to their layer's history and attends to all of it, so
that a prompt may come whole or in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.kv.store import RopeAndStoreKv, rope_then_store_kv
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.gated_delta import DeltaShape
from aserve.gpu.models.indexer import IndexInputs
from aserve.gpu.models.latent_attention import LatentInputs, attend_absorbed
from aserve.gpu.models.mamba2 import SpaceShape
from aserve.gpu.models.ngram_embedding import id_window_of
from aserve.gpu.models.recurrent import RecurrentSpec
from aserve_kernels.delta_rule import DeltaTokens, StateSpace


class DenseAttend:
    def __init__(self, store: RopeAndStoreKv = rope_then_store_kv) -> None:
        self._store = store
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.indexed: dict[int, Tensor] = {}  # index keys
        self.inputs: dict[int, Tensor] = {}  # of short convolutions
        self.states: dict[int, Tensor] = {}  # of recurrent layers
        self.chosen: Tensor | None = None  # bool [queries, keys], within `attend_sparse`
        self.spans: list[tuple[int, int]] = []  # tokens that see each other, from and to
        self.hidden_position: int | None = None  # as if the KV of that token were lost

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
        q, k, v = self._stored(layer, inputs)
        keys = self.keys[layer.index] = _appended(self.keys.get(layer.index), k)
        values = self.values[layer.index] = _appended(self.values.get(layer.index), v)
        repeats = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(repeats, dim=1))
        scores = scores * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = scores.masked_fill(~self._visible(layer, len(q), len(keys)), -torch.inf)
        weights = scores.softmax(-1)
        if inputs.sinks is not None:
            total = scores.logsumexp(-1, keepdim=True)
            weights = weights * torch.sigmoid(total - inputs.sinks[:, None, None])
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(repeats, dim=1))

    def advance(self, layer: RecurrentSpec, inputs: DeltaTokens) -> Tensor:
        """By the formulas of the whole history, token after token."""
        if inputs.space is not None:
            return self._advance_space(layer, inputs, inputs.space)
        shape, name = layer.shape, layer.index
        assert isinstance(shape, DeltaShape)
        num_new = len(inputs.channels)
        mixed = silu(self.convolve(layer, inputs.channels, inputs.conv))
        sizes = (shape.key_size, shape.key_size, shape.value_size)
        q, k, v = mixed.split(sizes, dim=-1)
        repeats = shape.linear_num_value_heads // shape.linear_num_key_heads
        q, k = (
            _of_length_one(x.unflatten(-1, (shape.linear_num_key_heads, -1))).repeat_interleave(
                repeats, dim=1
            )
            for x in (q, k)
        )
        v = v.unflatten(-1, (shape.linear_num_value_heads, -1))
        outputs = []
        for t in range(num_new):
            state = self.states.get(name, torch.zeros(*k.shape[1:], v.shape[-1]))
            state = state * inputs.log_decay[t].exp()[:, None, None]
            known = torch.einsum("hk,hkv->hv", k[t], state)
            change = (v[t] - known) * inputs.rate[t][:, None]
            state = self.states[name] = state + torch.einsum("hk,hv->hkv", k[t], change)
            outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
        return torch.stack(outputs) * shape.linear_key_head_dim**-0.5

    def _advance_space(
        self, layer: RecurrentSpec, inputs: DeltaTokens, space: StateSpace
    ) -> Tensor:
        shape, name = layer.shape, layer.index
        assert isinstance(shape, SpaceShape)
        mixed = silu(self.convolve(layer, inputs.channels, inputs.conv) + space.bias)
        size = shape.num_groups * shape.state_dim
        x, b, c = mixed.split((shape.inner_size, size, size), dim=-1)
        x = x.unflatten(-1, (shape.num_heads, shape.head_dim))
        repeats = shape.num_heads // shape.num_groups
        b, c = (
            part.unflatten(-1, (shape.num_groups, -1)).repeat_interleave(repeats, dim=1)
            for part in (b, c)
        )
        outputs = []
        for t in range(len(x)):
            state = self.states.get(name, torch.zeros(*b.shape[1:], shape.head_dim))
            new = torch.einsum("h,hk,hv->hkv", inputs.rate[t], b[t], x[t])
            state = self.states[name] = state * inputs.log_decay[t].exp()[:, None, None] + new
            outputs.append(torch.einsum("hk,hkv->hv", c[t], state))
        return torch.stack(outputs) + space.skip[:, None] * x

    def convolve(self, layer: RecurrentSpec, x: Tensor, conv: Tensor) -> Tensor:
        name, width = layer.index, conv.shape[1]
        history = self.inputs[name] = _appended(self.inputs.get(name), x)
        padded = torch.nn.functional.pad(history, (0, 0, width, 0))[-len(x) - width :]
        windows = [padded[t + 1 : t + 1 + width] for t in range(len(x))]
        return torch.stack([(window * conv.T).sum(0) for window in windows])

    def attend_sparse(self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs) -> Tensor:
        """A stable sort chooses the keys, and a mask hides the others."""
        name = layer.index
        indexed = self.indexed[name] = _appended(self.indexed.get(name), index.keys)
        is_seen = self._visible(layer, len(index.keys), len(indexed))
        scores = index.scores(indexed).float().masked_fill(~is_seen, -torch.inf)
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : layer.index_top_k]
        self.chosen = torch.zeros_like(is_seen).scatter_(1, best, value=True)
        try:
            return attend_absorbed(self, layer, inputs)
        finally:
            self.chosen = None

    def _stored(self, layer: LayerSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
        heads = inputs.heads
        if layer.value_dim is not None:
            q, latents = heads.split((layer.num_heads, layer.num_kv_heads), dim=1)
            return q, latents, latents[..., : layer.value_dim]
        k, v = heads.new_empty((2, len(heads), layer.num_kv_heads, layer.head_dim))
        slots = torch.arange(len(heads), device=heads.device)
        return self._store(heads, inputs.rope, slots, (k, v), (1.0, 1.0)), k, v

    def _visible(self, layer: LayerSpec, num_queries: int, num_keys: int) -> Tensor:
        """bool [queries, keys]."""
        query = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        key = torch.arange(num_keys)
        visible = key // layer.block_len <= query // layer.block_len  # one position, if causal
        if layer.window is not None:
            visible &= key > query - layer.window
        for start, end in self.spans:
            visible |= (start <= query) & (query < end) & (start <= key) & (key < end)
        if self.chosen is not None:
            visible &= self.chosen
        if self.hidden_position is not None:
            visible &= (key != self.hidden_position) | (key == query)
        return visible


def _of_length_one(x: Tensor) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()


def given_ids(model: CausalModel, tokens: Tensor) -> Tensor:
    """Returns what `forward` is given for a whole sequence: int64 [tokens], or [tokens, n] with the
    ids before each token."""
    size = id_window_of(model)
    if size == 1:
        return tokens
    shifted = [torch.nn.functional.pad(tokens, (place, 0), value=-1) for place in range(size)]
    return torch.stack([ids[: len(tokens)] for ids in shifted], dim=1)


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
    ids = given_ids(model, tokens)
    parts = zip(ids.split(sizes), torch.arange(len(tokens)).split(sizes), strict=True)
    return torch.cat([model.logits(model.forward(part, at, attend)) for part, at in parts])


def _appended(history: Tensor | None, new: Tensor) -> Tensor:
    return new.clone() if history is None else torch.cat((history, new))
