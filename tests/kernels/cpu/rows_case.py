"""Rows of queries for the attention kernels of the CPU, and the comparison with the reference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.cpu.paged_attention import paged_attention_ref
from aserve_kernels.paged_rows import Scoring

PAGE_SIZE = 16
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Chunks = tuple[tuple[int, int], ...]  # (queries, keys) of each row


class Attend(Protocol):
    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: HostRows,
        scoring: Scoring,
        *,
        out: Tensor,
    ) -> None: ...


@dataclass(frozen=True)
class Case:
    q: Tensor
    keys: Tensor
    values: Tensor
    rows: HostRows

    def alone(self, row: int) -> Case:
        queries = self.rows.queries
        columns = (queries.rows, queries.lens, queries.starts, queries.query_lens)
        own = QueryRows(*(column[[row]] for column in columns))
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, queries=own))

    def attended(self, attend: Attend, scoring: Scoring) -> Tensor:
        """NaN for tokens of other rows."""
        out = torch.full_like(self.q, torch.nan)
        attend(self.q, self.keys, self.values, self.rows, scoring, out=out)
        return out

    def assert_equals_reference(
        self, attend: Attend, scoring: Scoring, *, tolerance: float = 0.0
    ) -> None:
        """`tolerance`: at least; that of the dtype is another one."""
        got = self.attended(attend, scoring).float()
        q, keys, values = (tensor.float() for tensor in (self.q, self.keys, self.values))
        expected = Case(q, keys, values, self.rows).attended(paged_attention_ref, scoring)
        step = max(tolerance, TOLERANCES[self.q.dtype])
        torch.testing.assert_close(got, expected, rtol=step, atol=step, equal_nan=True)


def make(
    chunks: Chunks,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    """Unwritten slots are NaN, but for page 0, which may be read. `kv_dtype`: default `dtype`."""
    query_lens, lens = np.array(chunks, np.int64).reshape(-1, 2).T
    columns = -(-int(lens.max(initial=1)) // PAGE_SIZE)
    table = 1 + np.arange(len(chunks) * columns).reshape(-1, columns)[:, ::-1].copy()
    starts = np.cumsum(query_lens) - query_lens
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(int(query_lens.sum()), heads[0], head_dim, generator=generator).to(dtype)
    slots = ((1 + table.size) * PAGE_SIZE, heads[1], head_dim)
    keys, values = torch.full((2, *slots), torch.nan).to(kv_dtype or dtype)
    keys[:PAGE_SIZE] = values[:PAGE_SIZE] = 0
    for row, kv_len in enumerate(lens.tolist()):
        positions = np.arange(kv_len)
        used = table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        for pool in (keys, values):
            drawn = torch.randn(kv_len, *slots[1:], generator=generator)
            pool[torch.from_numpy(used)] = drawn.to(pool.dtype)
    queries = QueryRows(np.arange(len(chunks)), lens.copy(), starts, query_lens.copy())
    return Case(q, keys, values, HostRows(table, PAGE_SIZE, queries))
