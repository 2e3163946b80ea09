"""Cases for the paged attention kernels: random inputs, and the comparison with the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from aserve_kernels.paged_decode import paged_decode, paged_decode_ref
from aserve_kernels.paged_extend import paged_extend, paged_extend_ref
from aserve_kernels.paged_rows import PagedRows, Scoring, TreeMask
from aserve_kernels.paged_tiles import KvSplits

SCORING = Scoring(0.3)
CUT = KvSplits()
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Op(Protocol):
    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        paged: PagedRows,
        scoring: Scoring,
        *,
        out: Tensor,
        splits: KvSplits,
    ) -> None: ...


OPS: tuple[Op, Op] = (paged_decode, paged_extend)
REFERENCES: tuple[Op, Op] = (paged_decode_ref, paged_extend_ref)


@dataclass(frozen=True)
class Case:
    """`rows` has, for each row, the number of its queries and its KV length including them."""

    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    scoring: Scoring = SCORING
    splits: KvSplits = CUT
    max_len: int | None = None  # the bound of KV lengths that the host knows
    has_trees: bool = False  # the queries of each row are the nodes of a random tree


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    keys: Tensor
    values: Tensor
    paged: PagedRows

    def alone(self, row: int, queries: slice, kv_len: int | None = None) -> Inputs:
        """One row with these queries alone, as the last of its `kv_len` first tokens, or of all."""
        query_len = queries.stop - queries.start
        paged = replace(
            self.paged,
            rows=self.paged.rows[row : row + 1],
            lens=self.paged.lens[row : row + 1] if kv_len is None else torch.tensor([kv_len]),
            cu_query_lens=torch.tensor([0, query_len]),
        )
        return Inputs(self.q[queries], self.keys, self.values, paged)


def make_inputs(case: Case) -> Inputs:
    """Random inputs with scattered pages. Page 0 is NaN, and so are slots beyond a row's length or
    outside its window."""
    generator = torch.Generator().manual_seed(0)
    query_lens = torch.tensor([query_len for query_len, _ in case.rows], dtype=torch.int64)
    lens = torch.tensor([kv_len for _, kv_len in case.rows], dtype=torch.int64)
    longest = int(lens.max()) if len(lens) else 1
    columns = -(-longest // case.page_size)
    pages = 1 + torch.randperm(len(lens) * columns, generator=generator)
    table = torch.cat((torch.zeros(1, columns, dtype=torch.int64), pages.view(-1, columns)))
    num_slots = (1 + len(pages)) * case.page_size
    is_seen = torch.zeros(num_slots, dtype=torch.bool)
    for row, (query_len, kv_len) in enumerate(case.rows, start=1):
        window = case.scoring.window or kv_len
        positions = torch.arange(max(0, kv_len - query_len + 1 - window), kv_len)
        pages_of_row = table[row][positions // case.page_size]
        is_seen[pages_of_row * case.page_size + positions % case.page_size] = True
    pool = torch.randn(2, num_slots, case.heads[1], case.head_dim, generator=generator)
    pool[:, ~is_seen] = torch.nan
    keys, values = pool.to(case.kv_dtype or case.dtype)
    # The queries are a view of the joined QKV projection, as in a model.
    sizes = int(query_lens.sum()), case.heads[0] + 2, case.head_dim
    joined = torch.randn(sizes, generator=generator).to(case.dtype)
    cu_query_lens = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0))
    rows, max_len = torch.arange(1, len(lens) + 1), case.max_len or longest
    tree = random_trees(query_lens, generator) if case.has_trees else None
    paged = PagedRows(table, case.page_size, rows, lens, cu_query_lens, max_len, tree)
    return Inputs(joined[:, : case.heads[0]], keys, values, paged)


def random_trees(query_lens: Tensor, generator: torch.Generator) -> TreeMask:
    """Trees with several roots. Columns behind a row's queries hold anything."""
    num_tokens, width = int(query_lens.sum()), int(query_lens.max())
    seen = torch.rand(num_tokens, width, generator=generator) < 0.5
    for first, query_len in zip(query_lens.cumsum(0) - query_lens, query_lens, strict=True):
        rows = seen[first : first + query_len, :query_len]
        rows[:] = torch.eye(int(query_len), dtype=torch.bool)
        for node in range(2, int(query_len)):
            rows[node] |= rows[int(torch.randint(node, (), generator=generator))]
    return TreeMask.of(seen, query_lens.repeat_interleave(query_lens))


def run(ops: tuple[Op, ...], given: Inputs, case: Case) -> Tensor:
    """Runs the kernels on an output of NaN."""
    out = torch.full(given.q.shape, torch.nan, dtype=given.q.dtype)
    tensors = (given.q, given.keys, given.values)
    for op in ops:
        op(*tensors, given.paged, case.scoring, out=out, splits=case.splits)
    return out


def assert_equals_reference(case: Case) -> None:
    given = make_inputs(case)
    wide = Inputs(given.q.float(), given.keys, given.values, given.paged)
    got, expected = run(OPS, given, case).float(), run(REFERENCES, wide, case)
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
