"""Latent attention over paged latents: each row of a forward is attended absorbed or expanded.

models/latent_attention.py defines both forms. For a row with m queries and n keys, and per head and
query head sizes d_nope + d_v = e and d_rope = p, their numbers of multiplications per head are

    absorbed   m * r e   (queries and outputs)  +  m n * (2 r + p)
    expanded   n * r e   (keys and values)      +  m n * (e + p)

The host knows m, and n or a bound of it, so it plans the form of each row before the forward. The
absorbed rows run in another backend (the inner one), as attention with one KV head. The expanded
rows run here in plain torch: a tile of latents at a time is read through the page table and
expanded, and the tiles are merged by their log-sum-exps, as an online softmax.

A plan holds the rows of its batch. If padding has made the batch larger since it was planned, the
plan is too small for it and is made anew (`LatentBackend.bind`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionSite,
    AttentionUnavailable,
    StaticPlans,
)
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask
from aserve.gpu.kv.pools import KvPools, LayerKv
from aserve.gpu.kv.store import byte_view, from_kv_dtype, store_latents
from aserve.gpu.models.base import Attend
from aserve.gpu.models.latent_attention import LatentInputs, attend_absorbed
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch, ForwardOverrides
from aserve.gpu.transfer.pinned import to_device
from aserve.messages.base import ArrayI32

# NOTE: verification windows are shorter, so that a captured forward has no expanded rows.
MIN_QUERIES = 16
TILE = 1024  # keys that are expanded at a time


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The rows of a forward of `num_rows` rows, by their form. `inner` is the inner backend's plan
    of the absorbed rows."""

    num_rows: int
    absorbed: Part | None = None
    inner: object = None
    expanded: Part | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a forward, as a forward of their own."""

    batch: ForwardBatch
    tokens: Tensor | None  # int64, their places in the whole forward; None: it has no other rows


class LatentBackend:
    """An `AttentionBackend` around one that supports layers of latents."""

    __slots__ = ("_inner", "_layer", "_min_queries", "_pools")

    def __init__(
        self,
        inner: AttentionBackend,
        pools: KvPools,
        layer: LayerSpec,
        *,
        min_queries: int,
    ) -> None:
        """The form of a row is the same in all layers, and chosen by the sizes of `layer`."""
        self._inner = inner
        self._pools = pools
        self._layer = layer
        self._min_queries = min_queries

    @property
    def static_plans(self) -> StaticPlans | None:
        return self._inner.static_plans

    def plan(self, batch: ForwardBatch) -> object:
        is_expanded = self._is_expanded(batch)
        if is_expanded.all() and batch.num_rows:
            return LatentPlan(batch.num_rows, expanded=Part(batch, None))
        if not is_expanded.any():
            return LatentPlan(batch.num_rows, Part(batch, None), self._inner.plan(batch))
        absorbed = part_of(batch, ~is_expanded, self._pools)
        expanded = part_of(batch, is_expanded, self._pools)
        return LatentPlan(batch.num_rows, absorbed, self._inner.plan(absorbed.batch), expanded)

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        if not isinstance(plan, LatentPlan):  # a static plan of the inner backend
            return AttendLatents(_Absorbed(self._inner.bind(batch, plan)))
        if plan.num_rows != batch.num_rows:
            return self.bind(batch, self.plan(batch))
        parts: list[_Form] = []
        if plan.absorbed is not None:
            attend = self._inner.bind(plan.absorbed.batch, plan.inner)
            parts.append(_Absorbed(attend, plan.absorbed.tokens))
        if plan.expanded is not None:
            parts.append(_Expanded(plan.expanded, self._pools))
        return AttendLatents(*parts)

    def _is_expanded(self, batch: ForwardBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """bool [rows]. Draft trees need masks, which expanded rows do not support."""
        query_lens = batch.query_lens_cpu
        if batch.tree_mask is not None:
            return np.zeros(len(query_lens), np.bool_)
        is_cheaper = is_cheaper_expanded(self._layer, query_lens, batch.len_bounds_cpu)
        return is_cheaper & (query_lens >= self._min_queries)


def is_cheaper_expanded(
    layer: LayerSpec, query_lens: ArrayI32, lens: ArrayI32
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns the rows whose expanded form has fewer multiplications, bool [rows]."""
    assert layer.expanded_dim is not None
    rank, rope_dim = layer.out_dim, layer.head_dim - layer.out_dim
    m, n = query_lens.astype(np.float64), lens.astype(np.float64)
    product = rank * layer.expanded_dim
    absorbed = m * product + m * n * (2 * rank + rope_dim)
    expanded = n * product + m * n * (layer.expanded_dim + rope_dim)
    return np.asarray(expanded < absorbed)


class AttendLatents:
    """A `LatentAttend` that attends some rows in one form and the rest in the other."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: _Form) -> None:
        self._parts = parts

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
        raise BugError(f"layer {layer.index} has no latents to expand, as all others have")

    def attend_latents(self, layer: LayerSpec, inputs: LatentInputs, /) -> Tensor:
        if len(self._parts) == 1:
            return self._parts[0](layer, inputs)
        out = inputs.q.new_empty((*inputs.q.shape[:2], inputs.up.value.shape[1]))
        for part in self._parts:
            assert part.tokens is not None
            out.index_copy_(0, part.tokens, part(layer, inputs.select(part.tokens)))
        return out


class _Form(Protocol):
    """Attention in one form."""

    @property
    def tokens(self) -> Tensor | None:
        """The places of its tokens in the whole forward, int64; None: it has all tokens."""

    def __call__(self, layer: LayerSpec, inputs: LatentInputs, /) -> Tensor:
        """Stores the latents of its tokens, and attends -> [tokens, heads, d_v]."""


@dataclass(frozen=True, slots=True)
class _Absorbed:
    attend: Attend
    tokens: Tensor | None = None

    def __call__(self, layer: LayerSpec, inputs: LatentInputs, /) -> Tensor:
        return attend_absorbed(self.attend, layer, inputs)


class _Expanded:
    __slots__ = ("_batch", "_pools", "tokens")

    def __init__(self, part: Part, pools: KvPools) -> None:
        self._batch = part.batch
        self._pools = pools
        self.tokens = part.tokens

    def __call__(self, layer: LayerSpec, inputs: LatentInputs, /) -> Tensor:
        batch, kv = self._batch, self._pools.layers[layer.index]
        store_latents(inputs.latents, batch.slots[kv.group], kv.keys, kv.scales[0])
        outs: list[Tensor] = []
        start = 0
        for row, query_len in enumerate(batch.query_lens_cpu):
            tokens = slice(start, start + int(query_len))
            start = tokens.stop
            tiles = (
                (*inputs.up.expand(latents), positions)
                for latents, positions in self._latents(kv, row, inputs.q.dtype)
            )
            positions = batch.cache_positions[tokens]
            outs.append(merge_tiles(inputs.q[tokens], positions, tiles, scale=layer.scale))
        return torch.cat(outs)

    def _latents(
        self, kv: LayerKv, row: int, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the latents of a row, [keys, r + d_rope], and their positions, a tile at a time.
        The host may know a bound of the length only; what is behind the length is read as slot 0,
        because NaN that an earlier request has left would pass through a mask."""
        batch = self._batch
        bound, kv_len = int(batch.len_bounds_cpu[row]), batch.lens[row]
        for first in range(0, bound, TILE):
            positions = torch.arange(first, min(first + TILE, bound), device=kv_len.device)
            rows = batch.rows[row].expand_as(positions)
            slots = self._pools.slots(kv.group, rows, positions) * (positions < kv_len)
            latents = byte_view(kv.keys)[slots, 0].view(kv.keys.dtype)
            yield from_kv_dtype(latents, dtype, kv.scales[0]), positions


def merge_tiles(
    q: Tensor, positions: Tensor, tiles: Iterator[tuple[Tensor, Tensor, Tensor]], *, scale: float
) -> Tensor:
    """Causal attention over tiles of keys, merged by their log-sum-exps l:

        l_new = log(exp(l) + sum_k exp(s_k))
        o_new = exp(l - l_new) o + sum_k exp(s_k - l_new) v_k

    q [queries, heads, d] at `positions`; a tile has keys [keys, heads, d], values [keys, heads,
    d_v] and the positions of both. The first tile has a key that every query sees -> [queries,
    heads, d_v]. Scores and sums are float32 at least.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.transpose(0, 1)  # [heads, queries, d]
    out, log_total = q.new_zeros((), dtype=wide), q.new_full((), -torch.inf, dtype=wide)
    for keys, values, key_positions in tiles:
        scores = _product(queries, keys.permute(1, 2, 0)).mul_(scale)  # [heads, queries, keys]
        scores.masked_fill_(key_positions > positions[:, None], -torch.inf)
        log_new = torch.logaddexp(log_total, scores.logsumexp(dim=-1, keepdim=True))
        weights = scores.sub_(log_new).exp_().to(q.dtype)
        out = out * (log_total - log_new).exp() + _product(weights, values.transpose(0, 1))
        log_total = log_new
    return out.transpose(0, 1).to(q.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[heads, m, k] x [heads, k, n] -> [heads, m, n], float32 at least."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    # The operator that rounds nothing in between exists on CUDA alone.
    return torch.bmm(a, b, out_dtype=wide) if a.is_cuda else a.to(wide) @ b.to(wide)


def part_of(
    batch: ForwardBatch, which: np.ndarray[tuple[int], np.dtype[np.bool_]], pools: KvPools
) -> Part:
    """Returns the rows `which`, bool [rows], of a forward without a tree mask."""
    if which.all():
        return Part(batch, None)
    device, query_lens = batch.rows.device, batch.query_lens_cpu[which]
    starts = np.cumsum(batch.query_lens_cpu) - batch.query_lens_cpu
    own_starts = np.cumsum(query_lens) - query_lens
    token_to_row = np.repeat(np.arange(len(query_lens)), query_lens)
    offsets = np.arange(int(query_lens.sum())) - own_starts[token_to_row]
    rows = to_device(np.flatnonzero(which), device)
    tokens = to_device(starts[which][token_to_row] + offsets, device)
    own = DeviceBatch(
        iteration=batch.iteration,
        rows=batch.rows.index_select(0, rows),
        query_lens=batch.query_lens.index_select(0, rows),
        kv_lens=batch.kv_lens.index_select(0, rows),
        input_ids=batch.input_ids.index_select(0, tokens),
        token_to_row=to_device(token_to_row, device),
        offsets=to_device(offsets, device),
        query_lens_cpu=query_lens,
        len_bounds_cpu=batch.len_bounds_cpu[which],
    )
    lens_cpu = None if batch.lens_cpu is None else batch.lens_cpu[which] - query_lens
    overrides = ForwardOverrides(kv_lens_cpu=lens_cpu)
    return Part(ForwardBatch.init_new(own, pools, overrides), tokens)


def has_only_latents(site: AttentionSite) -> bool:
    """Whether the layers keep latents. Raises AttentionUnavailable if only some of them do: called
    by backends that use one kernel for all layers."""
    kinds = {layer.value_dim is not None for layer in site.layers}
    if len(kinds) > 1:
        raise AttentionUnavailable("does not support latent KV beside keys and values")
    return True in kinds


def with_latents(inner: AttentionBackend, site: AttentionSite) -> AttentionBackend:
    """Returns `inner`, with expanded rows if all layers have latents that can be expanded.

    With --deterministic all rows are absorbed, because the two forms round differently.
    """
    if site.is_deterministic or not site.layers or not all(map(_can_expand, site.layers)):
        return inner
    return LatentBackend(inner, site.pools, site.layers[0], min_queries=MIN_QUERIES)


def _can_expand(layer: LayerSpec) -> bool:
    is_plain = layer.window is None and layer.softcap is None and layer.mask is Mask.CAUSAL
    return layer.expanded_dim is not None and is_plain
