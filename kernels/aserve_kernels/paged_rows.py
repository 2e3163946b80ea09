"""Rows of queries over paged keys and values: what every attention op is given, and what it means.

It knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """`page_table`: integers [tables, pages]. For each of n rows: `rows`, its line of the table;
    `lens`, its KV length with its queries, which are at the last positions; `cu_query_lens` [n +
    1], where its queries stand among all tokens. Integers on the device; `max_len`, on the host, is
    a bound of every length that is the same in each step of a captured shape."""

    page_table: Tensor
    page_size: int
    rows: Tensor
    lens: Tensor
    cu_query_lens: Tensor
    max_len: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """q k^T is multiplied with `scale`, then capped: softcap * tanh(score / softcap). A query sees
    the last `window` positions, itself included. Stored keys and values are multiplied with
    `key_scale` and `value_scale`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


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
    """Plain torch, row by row in the dtype of q, for the rows whose number of queries `takes`."""
    num_groups = q.shape[1] // keys.shape[1]
    starts = paged.cu_query_lens
    for row, kv_len, start, stop in zip(paged.rows, paged.lens, starts, starts[1:], strict=False):
        part = slice(int(start), int(stop))
        if not takes(part.stop - part.start):
            continue
        positions = torch.arange(int(kv_len), device=q.device)
        distance = positions[len(positions) - (part.stop - part.start) :, None] - positions
        is_seen = (distance >= 0) & (distance < (scoring.window or int(kv_len)))
        slots = paged.page_table[row][positions // paged.page_size] * paged.page_size
        slots = slots + positions % paged.page_size
        is_unseen = ~is_seen.any(dim=0)[:, None, None]  # and may be anything, also NaN
        k, v = (
            (pool[slots].to(q.dtype) * factor).masked_fill(is_unseen, 0)
            for pool, factor in ((keys, scoring.key_scale), (values, scoring.value_scale))
        )
        k, v = (pool.repeat_interleave(num_groups, dim=1) for pool in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[part], k) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        out[part] = torch.einsum("hqk,khd->qhd", weights, v)
