"""The inputs of the paged attention kernels, and their reference in plain torch.

    out = softmax(cap(scale * q k^T) + mask) v

A row is one sequence of the batch. Its queries are its last positions. By default a query sees the
keys up to its own position, within the window. Without a causal mask it sees all keys of its row,
within the window on both sides. In a draft tree it sees the keys before the row's queries, its
ancestors and itself. Keys and values lie in pools of slots:
slot = page_table[row, position // page_size] * page_size + position % page_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The draft trees of a step's rows. A query comes after its ancestors, and for the window its
    position is its depth behind the keys before the row's queries."""

    seen: Tensor  # bool [tokens, >= query_len]: which of its row's queries each query sees
    depths: Tensor  # int64 [tokens]

    @classmethod
    def of(cls, seen: Tensor, query_lens: Tensor) -> TreeMask:
        """query_lens int64 [tokens]: that of each token's row. Columns behind it hold anything."""
        columns = torch.arange(seen.shape[1], device=seen.device)
        depths = (seen & (columns < query_lens[:, None])).sum(dim=1) - 1
        return cls(seen, depths)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step, in integers on the device."""

    page_table: Tensor  # [max_rows + 1, pages]
    page_size: int
    rows: Tensor  # [n], each row's row of the page table
    lens: Tensor  # [n], KV lengths with this step's queries
    cu_query_lens: Tensor  # [n + 1], cumulative: row i's queries are tokens [i] up to [i + 1]
    max_len: int  # a bound of `lens` known on the host; constant for a captured graph
    tree: TreeMask | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """The parameters of the scores: `s = scale * q k^T`, then `softcap * tanh(s / softcap)`."""

    scale: float
    window: int | None = None  # a query sees keys less than `window` positions away
    softcap: float | None = None
    key_scale: float = 1.0  # stored keys are multiplied by it
    value_scale: float = 1.0
    is_causal: bool = True  # else each query sees the keys behind it, too
    sinks: Tensor | None = None  # [heads]: a score per head that joins the softmax, without a value


def attend_ref(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    paged: PagedRows,
    scoring: Scoring,
    *,
    out: Tensor,
    takes: Callable[[int], bool],
) -> None:
    """Attends row by row in the dtype of q. Writes `out` for the rows with `takes(query_len)`."""
    group_size = q.shape[1] // keys.shape[1]
    starts = paged.cu_query_lens
    for row, kv_len, start, stop in zip(paged.rows, paged.lens, starts, starts[1:], strict=False):
        queries = slice(int(start), int(stop))
        if not takes(queries.stop - queries.start):
            continue
        positions = torch.arange(int(kv_len), device=q.device)
        is_seen = _seen(paged.tree, scoring, positions, queries)
        slots = paged.page_table[row][positions // paged.page_size] * paged.page_size
        slots = slots + positions % paged.page_size
        # A key that no query sees may be NaN: its page may belong to another request.
        is_unseen = ~is_seen.any(dim=0)[:, None, None]
        k, v = (
            (pool[slots].to(q.dtype) * factor).masked_fill(is_unseen, 0)
            for pool, factor in ((keys, scoring.key_scale), (values, scoring.value_scale))
        )
        k, v = (pool.repeat_interleave(group_size, dim=1) for pool in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[queries], k) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores = scores.masked_fill(~is_seen, -torch.inf)
        weights = softmax_with_sinks(scores, scoring.sinks)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, v)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., heads, queries, keys]. A head's sink, of sinks [heads], takes
    part like the score of a key with the value zero."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _seen(tree: TreeMask | None, scoring: Scoring, positions: Tensor, queries: slice) -> Tensor:
    """positions int64 [keys], from 0 on -> bool [queries, keys]."""
    query_len = queries.stop - queries.start
    prefix_len = len(positions) - query_len
    is_admitted = torch.ones(query_len, len(positions), dtype=torch.bool, device=positions.device)
    if tree is not None:
        is_admitted[:, prefix_len:] = tree.seen[queries, :query_len]
        positions = torch.cat((positions[:prefix_len], prefix_len + tree.depths[queries]))
    distance = positions[prefix_len:, None] - positions
    if scoring.is_causal:
        is_admitted &= distance >= 0
    return is_admitted & (distance.abs() < (scoring.window or len(positions)))
