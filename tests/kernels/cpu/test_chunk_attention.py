"""The chunk attention kernel of the CPU: chunks of every length, up to and over tile edges."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeAlias

import pytest
import torch

from aserve_kernels.cpu import chunk_attention as op
from aserve_kernels.cpu.paged_attention import paged_attention_ref
from aserve_kernels.paged_rows import Scoring
from tests.kernels.cpu.rows_case import PAGE_SIZE, Attend, Case, Chunks, make

CHUNKS: dict[str, Chunks] = {
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
    "a block and one": ((op.BLOCK + 1, op.BLOCK + 40),),
    "many": ((5, 40), (1, 130), (70, 70), (8, 200)),
}


# Of queries, and of keys and values.
KINDS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.float32),
    "float32 with KV of bfloat16": (torch.float32, torch.bfloat16),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
Kind: TypeAlias = tuple[torch.dtype, torch.dtype]


def kernel(num_workers: int = 1, kind: Kind = KINDS["bfloat16"]) -> Attend:
    dtype, kv_dtype = kind
    op.compile_chunk_attention(dtype, num_workers, kv_dtype)
    return partial(op.chunk_attention, num_workers=num_workers)


@of_every_kind
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_every_chunk_equals_the_reference(chunks: Chunks, num_workers: int, kind: Kind) -> None:
    dtype, kv_dtype = kind
    case = make(chunks, dtype=dtype, kv_dtype=kv_dtype)
    case.assert_equals_reference(kernel(num_workers, kind), Scoring(0.3))


@of_every_kind
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (7, 1), (40, 1), (300, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_heads_of_every_width_equal_the_reference(
    head_dim: int, heads: tuple[int, int], kind: Kind
) -> None:
    case = make(((5, 70), (1, 3)), heads, head_dim, *kind)
    case.assert_equals_reference(kernel(kind=kind), Scoring(0.1))


def test_kv_of_fp8_counts_times_its_scales() -> None:
    kind = torch.float32, torch.float8_e4m3fn
    case = make(((40, 40), (20, 130)), (6, 2), 32, *kind)
    got = case.attended(kernel(2, kind), Scoring(0.2, key_scale=1.5, value_scale=0.5))
    exact = replace(case, keys=case.keys.float() * 1.5, values=case.values.float() * 0.5)
    expected = exact.attended(paged_attention_ref, Scoring(0.2))
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@of_every_kind
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 100, 600])
def test_windows_and_caps_equal_the_reference(
    window: int, softcap: float | None, kind: Kind
) -> None:
    dtype, kv_dtype = kind
    case = make(((5, 700), (130, 130), (90, 190)), dtype=dtype, kv_dtype=kv_dtype)
    case.assert_equals_reference(kernel(kind=kind), Scoring(0.3, window, softcap))


@of_every_kind
def test_what_no_query_sees_any_more_may_be_anything(kind: Kind) -> None:
    """Pages outside the window may belong to other requests."""
    dtype, kv_dtype = kind
    case = make(((5, 200),), dtype=dtype, kv_dtype=kv_dtype)
    for page in case.rows.page_table[0, : (200 - 5 - 30 + 1) // PAGE_SIZE]:
        part = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        case.keys[part] = case.values[part] = torch.nan
    case.assert_equals_reference(kernel(kind=kind), Scoring(0.3, window=30))


@of_every_kind
@pytest.mark.parametrize("scale", [20.0, -20.0])
def test_large_scores_neither_overflow_nor_vanish(scale: float, kind: Kind) -> None:
    """Scores of up to 600 are rounded by 3e-5, in the reference as well."""
    dtype, kv_dtype = kind
    case = make(((70, 150),), dtype=dtype, kv_dtype=kv_dtype)
    case.assert_equals_reference(kernel(kind=kind), Scoring(scale), tolerance=2e-4)


def test_scores_are_not_rounded_to_the_width_of_their_operands() -> None:
    """Only the weights and the output are rounded to bfloat16."""
    case, scoring = make(((64, 512),), head_dim=128), Scoring(0.09)
    q, keys, values = (tensor.double() for tensor in (case.q, case.keys, case.values))
    expected = Case(q, keys, values, case.rows).attended(paged_attention_ref, scoring)
    error = case.attended(kernel(), scoring).double() - expected
    assert error.norm() < 0.003 * expected.norm()


@of_every_kind
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_chunk_gets_the_same_bits_alone_and_among_others(num_workers: int, kind: Kind) -> None:
    """LLVM may order the sums of the code for one worker and of that for several differently."""
    dtype, kv_dtype = kind
    case = make(CHUNKS["many"], dtype=dtype, kv_dtype=kv_dtype)
    together = case.attended(kernel(num_workers, kind), Scoring(0.3))
    for row in range(len(CHUNKS["many"])):
        alone = case.alone(row).attended(kernel(num_workers, kind), Scoring(0.3))
        own = ~alone.isnan()
        assert own.any(dim=(1, 2)).sum() == CHUNKS["many"][row][0]
        assert torch.equal(alone[own], together[own])
