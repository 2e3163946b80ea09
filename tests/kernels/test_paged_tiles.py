"""How work is cut: within the chip's limits, and by nothing but a row's own length."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.paged_tiles import Chip, Cut, decode_tiles, extend_tiles, fixed_split, padded

AMPERE, HOPPER = Chip(108, 99 << 10), Chip(132, 227 << 10)


@pytest.mark.parametrize("chip", [AMPERE, HOPPER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("num_groups", [1, 4, 7, 20, 64])
def test_tiles_fit_the_shared_memory_and_a_fixed_part_holds_whole_ones(
    num_groups: int, head_dim: int, dtype: torch.dtype, chip: Chip
) -> None:
    for cut in (Cut(chip), Cut(chip, fixed_split=fixed_split(1))):
        for choose in (decode_tiles, extend_tiles):
            tiles = choose(num_groups, head_dim, dtype, cut)
            line_bytes = padded(head_dim) * dtype.itemsize
            num_lines = tiles.lines + 2 * tiles.keys * tiles.num_stages
            assert num_lines * line_bytes <= chip.shared_bytes
            assert tiles.lines >= max(16, num_groups)
            assert (cut.fixed_split or cut.least_split) % tiles.keys == 0


def test_fixed_parts_have_the_same_tiles_in_every_step() -> None:
    cut = Cut(HOPPER, fixed_split=1024)
    assert decode_tiles(4, 128, torch.bfloat16, cut) == extend_tiles(4, 128, torch.bfloat16, cut)


@pytest.mark.parametrize("max_len", [1, 1024, 4096, 40_960, 131_072, 1_000_000])
def test_a_context_of_any_length_has_few_parts(max_len: int) -> None:
    assert 1 <= Cut(HOPPER).max_splits(max_len, None) <= 32
    fixed = Cut(HOPPER, fixed_split=fixed_split(max_len))
    assert 1 <= fixed.max_splits(max_len, None) <= 32
    assert fixed.max_splits(max_len, window=1) <= 2
