"""The prefill kernel of torch on the CPU against an explicit softmax."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.attention.chunked_prefill import TILE, sdpa_tiles
from aserve_kernels.paged_rows import Scoring
from tests.kernels.cpu.rows_case import make

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
