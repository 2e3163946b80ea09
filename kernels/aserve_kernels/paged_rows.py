"""The inputs of the paged attention kernels, and their reference in plain torch.

    out = softmax(cap(scale * q k^T) + mask) v

A row is one sequence of the batch. Its queries are its last positions, and a query sees the keys up
to its own position, within the window. Keys and values lie in pools of slots:
slot = page_table[row, position // page_size] * page_size + position % page_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step, in integers on the device."""

    page_table: Tensor  # [max_rows + 1, pages]
    page_size: int
    rows: Tensor  # [n], each row's row of the page table
    lens: Tensor  # [n], KV lengths with this step's queries
    cu_query_lens: Tensor  # [n + 1], cumulative: row i's queries are tokens [i] up to [i + 1]
    max_len: int  # a bound of `lens` known on the host; constant for a captured graph


@dataclass(frozen=True, slots=True)
class Scoring:
    """The parameters of the scores: `s = scale * q k^T`, then `softcap * tanh(s / softcap)`."""

    scale: float
    window: int | None = None  # a query sees the last `window` positions, its own included
    softcap: float | None = None
    key_scale: float = 1.0  # stored keys are multiplied by it
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
    """Attends row by row in the dtype of q. Writes `out` for the rows with `takes(query_len)`."""
    group_size = q.shape[1] // keys.shape[1]
    starts = paged.cu_query_lens
    for row, kv_len, start, stop in zip(paged.rows, paged.lens, starts, starts[1:], strict=False):
        queries = slice(int(start), int(stop))
        if not takes(queries.stop - queries.start):
            continue
        positions = torch.arange(int(kv_len), device=q.device)
        distance = positions[len(positions) - (queries.stop - queries.start) :, None] - positions
        is_seen = (distance >= 0) & (distance < (scoring.window or int(kv_len)))
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
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, v)
