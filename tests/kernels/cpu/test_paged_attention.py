"""The paged attention kernel of the CPU: heads of every width, over more keys than a tile has."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from aserve_kernels.cpu import paged_attention as op
from aserve_kernels.cpu.host_rows import QueryRows
from aserve_kernels.paged_rows import Scoring
from tests.kernels.cpu.rows_case import PAGE_SIZE, Case, make

ROWS = ((1, 1), (3, 64), (1, 65), (40, 150))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [1, 16, 24, 32, 40, 128])
def test_heads_of_every_width_equal_the_reference(
    head_dim: int, dtype: torch.dtype, num_workers: int
) -> None:
    op.compile_paged_attention(dtype, num_workers)
    attend = partial(op.paged_attention, num_workers=num_workers)
    make(ROWS, head_dim=head_dim, dtype=dtype).assert_equals_reference(attend, Scoring(0.3, 90))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [24, 32])
def test_keys_and_values_of_fp8_count_times_their_scales(head_dim: int, dtype: torch.dtype) -> None:
    fp8 = torch.float8_e4m3fn
    op.compile_paged_attention(dtype, 1, fp8)
    case, attend = make(ROWS, head_dim=head_dim, dtype=dtype), partial(op.paged_attention)
    stored = dataclasses.replace(case, keys=case.keys.to(fp8), values=case.values.to(fp8))
    got = stored.attended(partial(attend, num_workers=1), Scoring(0.2, 90, None, 1.5, 0.5))
    exact = dataclasses.replace(
        case, keys=stored.keys.to(dtype) * 1.5, values=stored.values.to(dtype) * 0.5
    )
    op.compile_paged_attention(dtype, 1)
    expected = exact.attended(partial(attend, num_workers=1), Scoring(0.2, 90))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [24, 32, 128])
def test_queries_of_float32_read_keys_and_values_of_bfloat16(
    head_dim: int, heads: tuple[int, int]
) -> None:
    op.compile_paged_attention(torch.float32, 1, torch.bfloat16)
    case = with_bfloat16_kv(make(ROWS, heads, head_dim=head_dim, dtype=torch.float32))
    attend = partial(op.paged_attention, num_workers=1)
    for window in (None, 1, 50, 90):
        case.assert_equals_reference(attend, Scoring(0.2, window, softcap=3.0))


def with_bfloat16_kv(case: Case) -> Case:
    keys, values = (tensor.to(torch.bfloat16) for tensor in (case.keys, case.values))
    return dataclasses.replace(case, keys=keys, values=values)


@pytest.mark.parametrize(
    "dtypes",  # of queries and of KV
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2],
    ids=str,
)
def test_what_lies_before_the_window_is_not_read(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Its pages may be another row's by then, with whatever that one has."""
    dtype, kv_dtype = dtypes
    op.compile_paged_attention(dtype, 1, kv_dtype)
    scoring, attend = Scoring(0.3, 50), partial(op.paged_attention, num_workers=1)
    case = make(((3, 150),), head_dim=32, dtype=dtype, kv_dtype=kv_dtype)
    expected = case.attended(attend, scoring)
    before = np.arange(150 - 3 - 50 + 1)
    slots = case.rows.page_table[0, before // PAGE_SIZE] * PAGE_SIZE + before % PAGE_SIZE
    case.keys[slots] = case.values[slots] = torch.nan
    assert torch.equal(case.attended(attend, scoring), expected)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_sinks_join_the_softmax(num_workers: int) -> None:
    """A sink below all scores, sinks among them, and one so far above that nothing else is left."""
    attend = partial(op.paged_attention, num_workers=num_workers)
    sinks = torch.tensor([-60.0, 0.0, 2.0, 300.0, -torch.inf, 1.0])
    case = make(ROWS, dtype=torch.float32)
    for stored in (case, with_bfloat16_kv(case)):
        op.compile_paged_attention(torch.float32, num_workers, stored.keys.dtype)
        stored.assert_equals_reference(attend, Scoring(0.3, 90, sinks=sinks))


@pytest.mark.parametrize(
    "dtypes",  # of queries and of KV
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 30, 90])
@pytest.mark.parametrize(
    ("head_dim", "heads"), [(24, (6, 2)), (256, (6, 2)), (32, (8, 2))], ids=str
)
def test_a_query_gets_the_same_bits_in_whatever_step_it_is(
    window: int | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    head_dim: int,
    heads: tuple[int, int],
) -> None:
    """In a whole prefill, in chunks, and in decode steps."""
    dtype, kv_dtype = dtypes
    case = make(((200, 200),), heads, head_dim=head_dim, dtype=dtype)
    if kv_dtype == torch.bfloat16:
        case = with_bfloat16_kv(case)
    op.compile_paged_attention(dtype, 1, kv_dtype)

    def attended(ends: list[int]) -> torch.Tensor:
        out = torch.empty_like(case.q)
        for start, end in itertools.pairwise([0, *ends]):
            own = QueryRows(*(np.array([value]) for value in (0, end, start, end - start)))
            rows = dataclasses.replace(case.rows, queries=own)
            tensors = (case.q, case.keys, case.values)
            op.paged_attention(*tensors, rows, Scoring(0.3, window), out=out, num_workers=1)
        return out

    assert torch.equal(attended([1, 7, 64, 150, 199, 200]), attended([200]))
