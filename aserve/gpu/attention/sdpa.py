"""Attention by torch's `scaled_dot_product_attention` over pages that are gathered and padded.

Rows of similar query length and KV length are put into one bucket, which is one padded call. This
keeps both the number of calls and the amount of padding low. `plan` computes the index tensors and
masks of each bucket for all layers of a group; `attend` gathers the KV of one layer and runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aserve.gpu.attention.base import AttentionKind, Capabilities, own_plan
from aserve.gpu.attention.reference import visible
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerGroup, LayerSpec, Mask
from aserve.gpu.kv.pools import KvPools, LayerKv
from aserve.gpu.kv.store import KV_DTYPES
from aserve.gpu.models.base import Attend
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.gpu.transfer.pinned import to_device
from aserve.messages.base import ArrayI32
from aserve_kernels.paged_rows import softmax_with_sinks

QUERY_LEN_FACTOR = 2  # query lengths in one bucket differ by less than this factor
KV_LEN_FACTOR = 4
MIN_KV_LEN = 64  # rows shorter than this may share a bucket


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that are computed in one call, padded to [rows, query_len] queries and [rows, kv_len]
    keys. The three index tensors are None if the bucket is the whole step without padding.
    """

    shape: tuple[int, int]  # rows, query_len
    queries: Tensor | None  # int64 [rows * query_len], the step's token for each padded query
    indices: Tensor | None  # int64 [real queries], among the padded ones; None: all are real
    tokens: Tensor | None  # int64 [real queries], the step's token for each
    pages: tuple[Tensor, ...]  # int64 [rows * pages] per layer group
    # bool [rows, 1, query_len, kv_len] per layer group and mask of its layers
    visible: tuple[Mapping[Mask, Tensor], ...]


class PagedSdpa:
    __slots__ = ("_groups", "_pools")
    static_plans = None

    def __init__(self, pools: KvPools, groups: tuple[LayerGroup, ...]) -> None:
        self._pools = pools
        self._groups = groups

    def plan(self, batch: ForwardBatch) -> object:
        keys = _bucket_keys(batch.query_lens_cpu, batch.len_bounds_cpu)
        starts = np.cumsum(batch.query_lens_cpu) - batch.query_lens_cpu
        spans = _spans_of(batch)
        return tuple(
            self._bucket(batch, np.flatnonzero((keys == key).all(axis=1)), starts, spans)
            for key in np.unique(keys, axis=0)
        )

    def bind(self, batch: ForwardBatch, plan: object) -> Attend:
        buckets: tuple[Bucket, ...] = own_plan(batch, plan, tuple, tree_masks=True)

        def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
            kv = self._pools.layers[layer.index]
            q = kv.rope_and_store_kv(layer, inputs, batch.slots[kv.group])
            if len(buckets) == 1 and buckets[0].tokens is None:
                return self._attend(layer, kv, buckets[0], q, inputs.sinks)
            out = torch.empty_like(q)
            for bucket in buckets:
                part = self._attend(layer, kv, bucket, q, inputs.sinks)
                out.index_copy_(0, _given(bucket.tokens), part)
            return out

        return attend

    def _bucket(
        self,
        batch: ForwardBatch,
        members: np.ndarray[tuple[int], np.dtype[np.intp]],
        starts: ArrayI32,
        spans: Tensor | None,
    ) -> Bucket:
        """members: row indices; starts int32 [rows]: each row's first token; spans int64
        [tokens, 2]. Shapes come from the host's query lengths and length bounds, masks from the
        device's exact lengths."""
        device = batch.rows.device
        query_lens = batch.query_lens_cpu[members]
        query_len = int(query_lens.max())
        num_pages = -(-int(batch.len_bounds_cpu[members].max()) // self._pools.page_size)
        is_whole = len(members) == batch.num_rows
        is_even = bool((query_lens == query_len).all())
        own = None if is_whole else to_device(members, device)
        rows = batch.rows if own is None else batch.rows.index_select(0, own)
        lens = batch.lens if own is None else batch.lens.index_select(0, own)
        offsets = torch.arange(query_len, device=device)
        real_query_lens = to_device(query_lens, device)
        positions = (lens - real_query_lens)[:, None] + offsets
        kv_positions = torch.arange(num_pages * self._pools.page_size, device=device)
        if is_whole and is_even:
            queries = indices = tokens = None
        else:
            steps = np.minimum(np.arange(query_len), query_lens[:, None] - 1)
            padded = (starts[members][:, None] + steps).reshape(-1)
            real = np.flatnonzero((np.arange(query_len) < query_lens[:, None]).reshape(-1))
            queries = to_device(padded, device)
            indices = None if is_even else to_device(real, device)
            tokens = to_device(padded[real], device)
        tree = None
        if batch.tree_mask is not None:
            tree = batch.tree_mask if queries is None else batch.tree_mask.index_select(0, queries)
            tree = tree[:, :query_len].view(len(members), query_len, query_len)
            tree = tree & (offsets < real_query_lens[:, None])[:, None]
        if spans is not None:
            spans = spans if queries is None else spans.index_select(0, queries)
            spans = spans.view(len(members), query_len, 2)
        keys = _Keys(positions, kv_positions, lens, tree, spans)
        masks = tuple(
            {
                mask: keys.visible(group.window, mask, block_len)[:, None]
                for mask, block_len in _masks_of(group).items()
            }
            for group in self._groups
        )
        return Bucket(
            shape=(len(members), query_len),
            queries=queries,
            indices=indices,
            tokens=tokens,
            pages=tuple(
                self._read_pages(table, rows, *of_group.values())
                for table, of_group in zip(self._pools.page_tables, masks, strict=True)
            ),
            visible=masks,
        )

    def _read_pages(self, table: Tensor, rows: Tensor, *is_seen: Tensor) -> Tensor:
        """Returns the pages to gather, int64 [rows * pages]. Pages that no query sees are read as
        page 0.

        WHY: the table may still name pages that left the window and were given to another row. A
        NaN in them would pass through the mask.
        """
        is_read = torch.stack([each.any(dim=2) for each in is_seen]).any(dim=0)
        by_page = is_read.view(len(rows), -1, self._pools.page_size)
        return (table[rows, : by_page.shape[1]] * by_page.any(dim=2)).flatten()

    def _attend(
        self, layer: LayerSpec, kv: LayerKv, bucket: Bucket, q: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """q [tokens, heads, head_dim] -> [real queries of the bucket, heads, head_dim]."""
        num_rows, query_len = bucket.shape
        if bucket.queries is not None:
            q = q.index_select(0, bucket.queries)
        q = q.reshape(num_rows, query_len, layer.num_heads, layer.head_dim).transpose(1, 2)
        stored = kv.read(lambda pool: self._gather(pool, bucket, kv.group), q.dtype)
        keys, values = (heads.transpose(1, 2) for heads in stored)
        is_seen = bucket.visible[kv.group][layer.mask]
        out = _softmax_product(layer, q, keys, values, is_seen, sinks)
        out = out.transpose(1, 2).reshape(-1, layer.num_heads, layer.head_dim)
        return out if bucket.indices is None else out.index_select(0, bucket.indices)

    def _gather(self, pool: Tensor, bucket: Bucket, group: int) -> Tensor:
        """-> [rows, kv_len, kv_heads, head_dim], in whole pages."""
        by_page = pool.view(-1, self._pools.page_size * pool.shape[1] * pool.shape[2])
        pages = by_page.index_select(0, bucket.pages[group])
        return pages.view(bucket.shape[0], -1, *pool.shape[1:])


def _masks_of(group: LayerGroup) -> dict[Mask, int]:
    """Returns the masks of its layers, each with the length of its blocks, which all layers share.
    A group without layers, which has token ids, is causal.
    """
    return {layer.mask: layer.block_len for layer in group.layers} or {Mask.CAUSAL: 1}


@dataclass(frozen=True, slots=True)
class _Keys:
    """The queries and keys of a bucket, to say which queries see which keys."""

    positions: Tensor  # int64 [rows, queries]
    kv_positions: Tensor  # int64 [keys]
    lens: Tensor  # int64 [rows]
    tree: Tensor | None  # bool [rows, queries, queries]
    spans: Tensor | None  # int64 [rows, queries, 2]: more keys that a query sees, from and to

    def visible(self, window: int | None, mask: Mask, block_len: int) -> Tensor:
        """bool [rows, queries, keys]."""
        is_seen = self._visible_behind(window, mask, block_len)
        if self.spans is None:
            return is_seen
        first, end = self.spans.unbind(dim=2)
        is_inside = (self.kv_positions >= first[..., None]) & (self.kv_positions < end[..., None])
        return is_seen | is_inside

    def _visible_behind(self, window: int | None, mask: Mask, block_len: int) -> Tensor:
        if self.tree is not None:
            return _visible_in_trees(self.tree, self.positions[:, 0], self.kv_positions, window)
        is_seen = visible(self.positions, self.kv_positions, window, mask=mask, block_len=block_len)
        if mask is Mask.CAUSAL:
            return is_seen
        return is_seen & (self.kv_positions < self.lens[:, None])[:, None]


def _spans_of(batch: ForwardBatch) -> Tensor | None:
    """int64 [tokens, 2]: the span of each token, which is empty for tokens of text."""
    features = batch.features
    if features is None or features.spans is None:
        return None
    spans = features.spans.new_zeros(batch.num_tokens, 2)
    return spans.index_copy(0, features.tokens, features.spans)


def _visible_in_trees(
    tree: Tensor, prefix_lens: Tensor, kv_positions: Tensor, window: int | None
) -> Tensor:
    """Does what `visible` does for queries that form draft trees -> bool [rows, queries, keys].

    tree bool [rows, queries, queries]: a query sees its ancestors and itself, and no query beyond
    its row's last. prefix_lens int64 [rows] are the KV lengths before the queries. A query's
    position, for the window, is its depth in the tree behind the prefix.
    """
    query_len = tree.shape[1]
    places = kv_positions - prefix_lens[:, None]  # [rows, keys], among the queries
    is_old, index = places < 0, places.clamp(0, query_len - 1)
    positions = prefix_lens[:, None] + tree.sum(dim=2) - 1  # [rows, queries]
    logical = torch.where(is_old, kv_positions, positions.gather(1, index))
    is_seen = visible(positions, logical[:, None], window)
    own = tree.gather(2, index[:, None].expand(-1, query_len, -1)) & (places < query_len)[:, None]
    return is_seen & (is_old[:, None] | own)


def _softmax_product(
    layer: LayerSpec,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    is_seen: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """q [rows, heads, query_len, head_dim], keys and values [rows, kv_heads, kv_len, head_dim] ->
    like q.

    The query heads that share a KV head are stacked as additional queries of that head.
    """
    num_rows, _, query_len, head_dim = q.shape
    groups = layer.num_heads // layer.num_kv_heads
    q = q.reshape(num_rows, layer.num_kv_heads, groups * query_len, head_dim)
    is_seen = is_seen.expand(-1, groups, -1, -1).reshape(num_rows, 1, groups * query_len, -1)
    if layer.softcap is None and sinks is None:
        out = scaled_dot_product_attention(q, keys, values, attn_mask=is_seen, scale=layer.scale)
    else:
        scores = torch.matmul(q, keys.transpose(2, 3)) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = scores.masked_fill(~is_seen, -torch.inf)
        by_head = scores.view(num_rows, layer.num_heads, query_len, -1)
        out = softmax_with_sinks(by_head, sinks).view(scores.shape) @ values
    return out.reshape(num_rows, layer.num_heads, query_len, head_dim)


def _bucket_keys(
    query_lens: ArrayI32, lens: ArrayI32
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """int64 [rows, 2]: rows with equal keys share a bucket."""
    query_keys = np.ceil(np.log(query_lens) / np.log(QUERY_LEN_FACTOR))
    relative_lens = np.maximum(lens, MIN_KV_LEN) / MIN_KV_LEN
    kv_keys = np.ceil(np.log(relative_lens) / np.log(KV_LEN_FACTOR))
    return np.stack((query_keys, kv_keys), axis=1).astype(np.int64)


def _given(tokens: Tensor | None) -> Tensor:
    assert tokens is not None  # None only if the bucket is the whole step
    return tokens


KIND = AttentionKind(
    Capabilities(
        kv_dtypes=frozenset(KV_DTYPES.values()),
        masks=frozenset(Mask),
        sinks=True,
        tree_masks=True,
        whole_pages=True,
        can_capture=True,
    ),
    lambda site: PagedSdpa(site.pools, site.groups),
)
