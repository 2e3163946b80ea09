"""The chunk attention kernel of the CPU: chunks of every length, up to and over tile edges."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from aserve_kernels.cpu import chunk_attention as op
from aserve_kernels.cpu.host_rows import HostRows, QueryRows
from aserve_kernels.cpu.paged_attention import paged_attention_ref
from aserve_kernels.paged_rows import Scoring

PAGE_SIZE = 16
# (queries, keys) of each row
CHUNKS = {
    "no row": (),
    "one query": ((1, 1),),
    "queries that fill no product": ((3, 70),),
    "a packed block": ((32, 32),),
    "a packed block and one": ((33, 33),),
    "behind less than a tile": ((20, op.TILE + 19),),
    "behind a tile": ((20, op.TILE + 20),),
    "behind a tile and one": ((20, op.TILE + 21),),
    "over a tile's edge": ((300, op.TILE + 100),),
    "behind two tiles": ((5, 2 * op.TILE + 40),),
    "a block and one": ((257, 300),),
    "many": ((5, 40), (1, 130), (70, 70), (8, 200)),
}


@dataclass(frozen=True)
class Given:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: HostRows


def make(
    chunks: tuple[tuple[int, int], ...], heads: tuple[int, int] = (6, 2), head_dim: int = 32
) -> Given:
    """Unwritten slots are NaN, but for page 0, which may be read."""
    query_lens = np.array([query_len for query_len, _ in chunks], np.int64)
    lens = np.array([kv_len for _, kv_len in chunks], np.int64)
    columns = -(-int(lens.max(initial=1)) // PAGE_SIZE)
    table = 1 + np.arange(len(chunks) * columns).reshape(-1, columns)[:, ::-1].copy()
    queries = QueryRows(
        np.arange(len(chunks)), lens, np.cumsum(query_lens) - query_lens, query_lens
    )
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(int(query_lens.sum()), heads[0], head_dim, generator=generator).bfloat16()
    slots = ((1 + table.size) * PAGE_SIZE, heads[1], head_dim)
    keys, values = torch.full((2, *slots), torch.nan).bfloat16()
    keys[:PAGE_SIZE] = values[:PAGE_SIZE] = 0
    for row, kv_len in enumerate(lens):
        positions = np.arange(kv_len)
        used = torch.from_numpy(
            table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        )
        for pool in (keys, values):
            pool[used] = torch.randn(int(kv_len), *slots[1:], generator=generator).bfloat16()
    return Given(q, keys, values, HostRows(table, PAGE_SIZE, queries))


def attended(given: Given, scoring: Scoring, *, num_workers: int = 1) -> torch.Tensor:
    out = torch.empty_like(given.q)
    op.compile_chunk_attention(num_workers)
    rows = given.rows
    op.chunk_attention(
        given.q, given.keys, given.values, rows, scoring, out=out, num_workers=num_workers
    )
    return out


def assert_equals_reference(given: Given, scoring: Scoring, *, num_workers: int = 1) -> None:
    got = attended(given, scoring, num_workers=num_workers)
    expected = torch.empty(given.q.shape)
    q, keys, values = (tensor.float() for tensor in (given.q, given.keys, given.values))
    paged_attention_ref(q, keys, values, given.rows, scoring, out=expected)
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_every_chunk_equals_the_reference(
    chunks: tuple[tuple[int, int], ...], num_workers: int
) -> None:
    assert_equals_reference(make(chunks), Scoring(0.3), num_workers=num_workers)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1), (40, 1), (300, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_heads_of_every_width_equal_the_reference(head_dim: int, heads: tuple[int, int]) -> None:
    assert_equals_reference(make(((5, 70), (1, 3)), heads, head_dim), Scoring(0.1))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 5, 16, 63, 64, 65, 100, 600])
def test_windows_and_caps_equal_the_reference(window: int, softcap: float | None) -> None:
    given = make(((5, 700), (130, 130), (90, 190)))
    assert_equals_reference(given, Scoring(0.3, window, softcap))


def test_what_no_query_sees_any_more_may_be_anything() -> None:
    """Pages outside the window may belong to other requests."""
    given = make(((5, 200),))
    gone = given.rows.page_table[0, : (200 - 5 - 30 + 1) // PAGE_SIZE]
    for page in gone:
        part = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        given.keys[part] = given.values[part] = torch.nan
    assert_equals_reference(given, Scoring(0.3, window=30))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    given = make(((70, 150),))
    assert_equals_reference(given, Scoring(20.0))
    assert_equals_reference(given, Scoring(-20.0))


def test_scores_are_not_rounded_to_the_width_of_their_operands() -> None:
    """Only the weights and the output are rounded to bfloat16."""
    given = make(((64, 512),), head_dim=128)
    expected = torch.empty(given.q.shape, dtype=torch.float64)
    q, keys, values = (tensor.double() for tensor in (given.q, given.keys, given.values))
    paged_attention_ref(q, keys, values, given.rows, Scoring(0.09), out=expected)
    error = attended(given, Scoring(0.09)).double() - expected
    assert error.norm() < 0.003 * expected.norm()


def test_a_chunk_gets_the_same_bits_alone_and_among_others() -> None:
    given = make(CHUNKS["many"])
    together = attended(given, Scoring(0.3))
    queries = given.rows.queries
    columns = queries.rows, queries.lens, queries.starts, queries.query_lens
    for row in range(len(queries.rows)):
        rows = dataclasses.replace(
            given.rows, queries=QueryRows(*(column[[row]] for column in columns))
        )
        alone = attended(dataclasses.replace(given, rows=rows), Scoring(0.3), num_workers=2)
        tokens = slice(queries.starts[row], queries.starts[row] + queries.query_lens[row])
        assert torch.equal(alone[tokens], together[tokens])
