"""Tiles fit into shared memory, and splits depend on nothing but a row's own length."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.paged_tiles import (
    Chip,
    KvSplits,
    decode_tiles,
    extend_tiles,
    fixed_split,
    padded,
)

AMPERE, HOPPER = Chip(108, 99 << 10), Chip(132, 227 << 10)


@pytest.mark.parametrize("chip", [AMPERE, HOPPER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("group_size", [1, 4, 7, 20, 64])
def test_tiles_fit_the_shared_memory_and_divide_a_fixed_split(
    group_size: int, head_dim: int, dtype: torch.dtype, chip: Chip
) -> None:
    for splits in (KvSplits(chip), KvSplits(chip, fixed_split=fixed_split(1))):
        for choose in (decode_tiles, extend_tiles):
            tiles = choose(group_size, head_dim, dtype, splits)
            vector_bytes = padded(head_dim) * dtype.itemsize
            num_vectors = tiles.block_m + 2 * tiles.block_n * tiles.num_stages
            assert num_vectors * vector_bytes <= chip.shared_bytes
            assert tiles.block_m >= max(16, group_size)
            assert (splits.fixed_split or splits.min_split) % tiles.block_n == 0


@pytest.mark.parametrize("max_len", [1, 1024, 4096, 40_960, 131_072, 1_000_000])
def test_a_context_of_any_length_has_few_splits(max_len: int) -> None:
    assert 1 <= KvSplits(HOPPER).most(max_len, None) <= 32
    fixed = KvSplits(HOPPER, fixed_split=fixed_split(max_len))
    assert 1 <= fixed.most(max_len, None) <= 32
    assert fixed.most(max_len, window=1) <= 2
