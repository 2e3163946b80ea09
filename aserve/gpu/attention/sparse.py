"""Sparse attention (DSA) over paged latents: each query attends to the keys that an indexer chose.

models/indexer.py defines the choice. The index keys of all tokens are stored here, in slots of the
same page tables as the latents. A row that is not longer than `index_top_k` attends to all its
keys, so it runs in another backend (the inner one), as in a dense model. For the queries of other
rows this file chooses keys and makes a page table of one slot per page, in which each query is a
row of its own. So every kernel of paged latents can attend to chosen keys (`AttendSlots`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionSite,
    AttentionUnavailable,
    StaticPlans,
    StaticShape,
)
from aserve.gpu.attention.latents import Part, part_of
from aserve.gpu.attention.slots import Chosen, ScoreKeys, SparseOps, tiles
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerGroup, LayerSpec
from aserve.gpu.kv.store import store_latents
from aserve.gpu.models.base import Attend
from aserve.gpu.models.indexer import IndexInputs, best_keys
from aserve.gpu.models.latent_attention import LatentInputs, attend_latents
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import ArrayI32
from aserve_kernels.paged_rows import PagedRows

SHORT_ROW = 15  # the most queries of a row whose queries are scored one by one


def index_bytes_per_token(group: LayerGroup, dtype: torch.dtype) -> int:
    return sum(layer.index_dim for layer in group.layers) * dtype.itemsize


class IndexKeys:
    """The index keys of all layers, in slots of the page tables of the latents. Written by
    `attend_sparse` only."""

    __slots__ = ("_keys", "_pools", "_score_keys")

    def __init__(self, site: AttentionSite, score_keys: ScoreKeys) -> None:
        pools, sizes = site.pools, site.pools.num_pages
        self._pools = pools
        self._score_keys = score_keys
        self._keys = {
            layer.index: site.device.zeros(
                (sizes[pools.layers[layer.index].group] * pools.page_size, layer.index_dim),
                site.dtype,
            )
            for layer in site.layers
        }
        pools.index_keys.update(self._keys)  # they move with the latents

    @property
    def size_bytes(self) -> int:
        return sum(keys.nbytes for keys in self._keys.values())

    def store(self, layer: LayerSpec, keys: Tensor, slots: Tensor) -> None:
        """keys [tokens, index dim], slots int64 [tokens]"""
        self._keys[layer.index].index_copy_(0, slots, keys)

    def choose(self, layer: LayerSpec, index: IndexInputs, batch: ForwardBatch) -> Tensor:
        """Returns the positions of the keys that each query attends to, int64 [tokens, most keys]
        in ascending order. Behind them are positions beyond the row. A row is read up to the bound
        of its length."""
        beyond = int(batch.len_bounds_cpu.max(initial=0))
        most = min(layer.index_top_k, beyond)
        if batch.query_lens_cpu.max(initial=0) <= SHORT_ROW:
            return self._of_short_rows(layer, index, batch, beyond)
        shape = (batch.num_tokens, most)
        chosen = torch.full(shape, beyond, dtype=torch.int64, device=batch.rows.device)
        start = 0
        for row, query_len in enumerate(map(int, batch.query_lens_cpu)):
            keys = self._of_row(layer, batch, row)
            indices = torch.arange(len(keys), device=keys.device)
            for tile in tiles(query_len, len(keys) * index.q.shape[1]):
                tokens = slice(start + tile.start, start + tile.stop)
                is_seen = indices <= batch.cache_positions[tokens, None]
                best = best_keys(index.select(tokens).scores(keys), is_seen, most)
                chosen[tokens, : best.shape[1]] = best.masked_fill(best == len(keys), beyond)
            start += query_len
        return chosen

    def _of_short_rows(
        self, layer: LayerSpec, index: IndexInputs, batch: ForwardBatch, beyond: int
    ) -> Tensor:
        """Returns the same of decodes and verification windows. Each query is scored for itself, by
        what the device knows of it."""
        pools, parts = self._pools, list[Tensor]()
        table = pools.page_tables[pools.layers[layer.index].group]
        indices = torch.arange(beyond, device=batch.rows.device)
        ends = torch.arange(batch.num_tokens + 1, device=batch.rows.device)
        for tile in tiles(batch.num_tokens, beyond):
            positions = batch.cache_positions[tile]
            paged = PagedRows(
                table, pools.page_size, batch.token_rows[tile], positions + 1,
                ends[: len(positions) + 1], max_len=beyond,
            )  # fmt: skip
            scores = self._score_keys(index.select(tile), self._keys[layer.index], paged)
            parts.append(best_keys(scores, indices <= positions[:, None], layer.index_top_k))
        return torch.cat(parts)

    def _of_row(self, layer: LayerSpec, batch: ForwardBatch, row: int) -> Tensor:
        """[keys up to the length's bound, index dim]. What is behind the length is read as slot 0,
        like what lies behind the row's pages."""
        group = self._pools.layers[layer.index].group
        positions = torch.arange(int(batch.len_bounds_cpu[row]), device=batch.rows.device)
        slots = self._pools.slots(group, batch.rows[row].expand_as(positions), positions)
        return self._keys[layer.index].index_select(0, slots * (positions < batch.lens[row]))


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """The rows of a forward of `num_rows` rows. `inner` is the inner backend's plan of the rows
    that attend to all their keys. If there are none, all rows are sparse."""

    num_rows: int
    dense: Part | None = None
    inner: object = None
    sparse: Part | None = None  # the other rows, if some are dense


class SparseBackend:
    """An `AttentionBackend` around one that supports layers of latents."""

    __slots__ = ("_inner", "_pools", "_top_k", "attend_slots", "index_keys")

    def __init__(self, inner: AttentionBackend, site: AttentionSite, ops: SparseOps) -> None:
        self._inner = inner
        self._pools = site.pools
        self.attend_slots = ops.attend_slots
        self._top_k = min(layer.index_top_k for layer in site.layers)
        self.index_keys = IndexKeys(site, ops.score_keys)

    @property
    def static_plans(self) -> StaticPlans | None:
        return _SPARSE_ROWS

    def plan(self, batch: ForwardBatch) -> object:
        is_dense = np.asarray(batch.len_bounds_cpu <= self._top_k)
        if not is_dense.any():
            return SparsePlan(batch.num_rows)
        dense = part_of(batch, is_dense, self._pools)
        inner = self._inner.plan(dense.batch)
        if is_dense.all():
            return SparsePlan(batch.num_rows, dense, inner)
        return SparsePlan(batch.num_rows, dense, inner, part_of(batch, ~is_dense, self._pools))

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        if not isinstance(plan, SparsePlan):
            raise BugError(f"step {batch.iteration}: a plan of another backend: {plan!r}")
        if plan.num_rows != batch.num_rows:
            return self.bind(batch, self.plan(batch))
        dense = None
        if plan.dense is not None:
            dense = self._inner.bind(plan.dense.batch, plan.inner)
        return AttendChosen(self, batch, plan, dense)

    def attend(
        self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs, batch: ForwardBatch
    ) -> Tensor:
        """Attends to the chosen keys -> [tokens, heads, d_v]. Their index keys are stored."""
        kv = self._pools.layers[layer.index]
        store_latents(inputs.latents, batch.slots[kv.group], kv.keys, kv.scales[0])
        positions = self.index_keys.choose(layer, index, batch)
        lens = (batch.cache_positions + 1).clamp(max=positions.shape[1])
        is_key = torch.arange(positions.shape[1], device=lens.device) < lens[:, None]
        rows = batch.token_rows[:, None].expand_as(positions)
        slots = self._pools.slots(kv.group, rows, positions * is_key) * is_key
        q = inputs.up.absorb(inputs.q)
        return inputs.up.values(self.attend_slots(q, kv, Chosen(slots, lens), layer))


class AttendChosen:
    """The `SparseAttend` of one forward."""

    __slots__ = ("_backend", "_batch", "_dense", "_plan")

    def __init__(
        self,
        backend: SparseBackend,
        batch: ForwardBatch,
        plan: SparsePlan,
        dense: Attend | None,
    ) -> None:
        self._backend = backend
        self._batch = batch
        self._plan = plan
        self._dense = dense

    def __call__(self, layer: LayerSpec, inputs: AttentionInputs, /) -> Tensor:
        raise BugError(f"layer {layer.index} has no indexer, as all others have")

    def attend_sparse(
        self, layer: LayerSpec, inputs: LatentInputs, index: IndexInputs, /
    ) -> Tensor:
        backend, dense, sparse = self._backend, self._plan.dense, self._plan.sparse
        backend.index_keys.store(layer, index.keys, self._batch.slots[0])
        if dense is None:
            return backend.attend(layer, inputs, index, self._batch)
        assert self._dense is not None
        if sparse is None:
            return attend_latents(self._dense, layer, inputs)
        assert dense.tokens is not None
        assert sparse.tokens is not None
        out = inputs.q.new_empty((*inputs.q.shape[:2], inputs.up.value.shape[1]))
        own = inputs.select(dense.tokens)
        out.index_copy_(0, dense.tokens, attend_latents(self._dense, layer, own))
        inputs, index = inputs.select(sparse.tokens), index.select(sparse.tokens)
        out.index_copy_(0, sparse.tokens, backend.attend(layer, inputs, index, sparse.batch))
        return out


class _SparseRows:
    """The `StaticPlans` of sparse attention. In a captured forward all rows attend to chosen keys,
    however short they are: which rows are short differs from replay to replay. So the inner backend
    plans nothing for it."""

    def is_better_eager(self, num_rows: int, shared_pages: int) -> bool:
        return False

    def make(self, shape: StaticShape) -> object:
        return SparsePlan(shape.num_rows)

    def refresh(self, plan: object, lens: ArrayI32) -> None:
        pass


_SPARSE_ROWS = _SparseRows()


def with_sparse(
    inner: AttentionBackend,
    site: AttentionSite,
    make_ops: Callable[[AttentionSite], SparseOps],
) -> AttentionBackend:
    """Returns `inner`, with chosen keys if the layers have an indexer."""
    if not any(layer.index_dim for layer in site.layers):
        return inner
    for layer in site.layers:
        if not layer.index_dim or layer.value_dim is None or layer.window is not None:
            raise AttentionUnavailable("supports indexers in all layers or in none")
    if site.has_tree_masks:
        raise AttentionUnavailable("does not support tree masks with sparse attention")
    if site.is_deterministic:
        raise AttentionUnavailable("does not support --deterministic with sparse attention")
    return SparseBackend(inner, site, make_ops(site))
