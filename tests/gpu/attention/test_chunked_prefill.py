"""The prefill kernel of torch on the CPU against an explicit softmax."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from aserve.gpu.attention.chunked_prefill import TILE, sdpa_tiles, widened_chunks
from aserve_kernels.cpu.chunk_attention import chunk_attention, compile_chunk_attention
from aserve_kernels.paged_rows import Scoring
from tests.kernels.cpu.rows_case import Attend, make

CHUNKS = {
    "a fresh prompt": (40, 0),
    "one token": (1, 0),
    "behind one token": (5, 1),
    "behind less than a page": (20, 15),
    "behind a page": (20, 16),
    "behind a page and one": (20, 17),
    "behind less than a tile": (9, TILE - 1),
    "behind a tile": (9, TILE),
    "behind a tile and one": (9, TILE + 1),
    "behind several tiles": (3, 2 * TILE + 100),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize(("query_len", "num_before"), CHUNKS.values(), ids=CHUNKS)
def test_every_token_sees_itself_and_what_came_before(
    query_len: int, num_before: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    chunks = ((2, 2), (query_len, query_len + num_before), (1, 1))
    case = make(chunks, heads, 16, dtype).alone(1)
    case.assert_equals_reference(sdpa_tiles, Scoring(0.4))


@pytest.mark.parametrize("attend", [sdpa_tiles, partial(widened_chunks, num_workers=1)])
def test_kv_of_fp8_counts_times_its_scales(attend: Attend) -> None:
    compile_chunk_attention(torch.bfloat16, 1)
    case = make(((40, 40), (20, 130)), (6, 2), 32)
    stored = replace(
        case, keys=case.keys.to(torch.float8_e4m3fn), values=case.values.to(torch.float8_e4m3fn)
    )
    got = stored.attended(attend, Scoring(0.2, key_scale=1.5, value_scale=0.5))
    exact = replace(case, keys=stored.keys.bfloat16() * 1.5, values=stored.values.bfloat16() * 0.5)
    expected = exact.attended(partial(chunk_attention, num_workers=1), Scoring(0.2))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-2)
