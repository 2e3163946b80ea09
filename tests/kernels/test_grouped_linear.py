"""Products of experts' rows, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve_kernels.grouped_coded_linear import (
    CodedExperts,
    grouped_coded_linear,
    grouped_coded_linear_ref,
)
from aserve_kernels.grouped_linear import BLOCK_M, grouped_linear, grouped_linear_ref
from aserve_kernels.weight_only_linear import block_of, pack_4_bits
from tests.kernels.tolerance import TOLERANCES, assert_close, draw

# Rows of each expert, with gaps of rows that belong to none; (inputs, outputs).
COUNTS = [[0], [1], [0, 5, 0], [BLOCK_M, 0, BLOCK_M + 1], [3, 1, 2 * BLOCK_M + 3, 0, 1]]
SHAPES = [(8, 8), (100, 33)]


def bounds(counts: list[int], gap: int = 0) -> tuple[Tensor, Tensor, int]:
    sizes = torch.tensor(counts, dtype=torch.int32)
    starts = (sizes + gap).cumsum(0, dtype=torch.int32) - sizes - gap
    return starts, starts + sizes, int((sizes + gap).sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("gap", "has_bias"), [(0, False), (4, True)])
def test_each_experts_rows_meet_its_own_weight(
    has_bias: bool, gap: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    num_ins, num_outs = shape
    for counts in COUNTS:
        starts, ends, num_rows = bounds(counts, gap)
        x = draw(num_rows, num_ins + 3, dtype=dtype)[:, :num_ins]
        weights = draw(len(counts), num_outs, num_ins, dtype=dtype, seed=1) / num_ins**0.5
        biases = draw(len(counts), num_outs, dtype=dtype, seed=2) if has_bias else None
        got = grouped_linear(x, weights, biases, starts, ends)
        expected = grouped_linear_ref(x, weights, biases, starts, ends)
        for start, end in zip(starts, ends, strict=True):
            assert_close(got[start:end], expected[start:end])


@pytest.mark.usefixtures("sums_in_one_order")
def test_a_row_gets_the_same_bits_alone_and_among_any_number() -> None:
    x, weights = draw(2 * BLOCK_M + 3, 70), draw(2, 40, 70, seed=1)
    starts, ends, _ = bounds([BLOCK_M + 2, BLOCK_M + 1])
    expected = grouped_linear(x, weights, None, starts, ends)
    for row in (0, BLOCK_M, BLOCK_M + 1, BLOCK_M + 2, 2 * BLOCK_M + 2):
        starts, ends, _ = bounds([1, 0] if row < BLOCK_M + 2 else [0, 1])
        alone = grouped_linear(x[row : row + 1], weights, None, starts, ends)
        assert torch.equal(alone, expected[row : row + 1])


# (kind of codes, outputs and inputs of a block with one scale, whether there are offsets): a scale
# per row, blocks that divide no side, and groups of 4 bits.
FORMATS = [
    ("fp8", (1, 300), False),
    ("fp8", (128, 128), False),
    ("fp8", (32, 64), False),
    ("fp8", (1, 32), False),
    ("int8", (1, 300), False),
    ("int4", (1, 300), True),
    ("int4", (1, 128), True),
    ("int4", (1, 32), False),
    ("int4", (1, 32), True),
    ("e2m1", (1, 32), False),
]
Format = tuple[str, tuple[int, int], bool]


def coded(num_experts: int, form: Format, *, num_outs: int = 70) -> CodedExperts:
    kind, (rows, group), has_offsets = form
    shape = (num_experts, -(-300 // group), -(-num_outs // rows))
    scales = draw(*shape, seed=3).abs() / 16 + 0.01
    offsets = draw(*shape, seed=4) / 8 if has_offsets else None
    drawn = draw(num_experts, num_outs, 300, seed=1)
    if kind == "fp8":
        return CodedExperts(drawn.to(torch.float8_e4m3fn), scales, offsets, 300, group, rows)
    if kind == "int8":
        codes = (drawn * 40).clamp(-127, 127).to(torch.int8)
        return CodedExperts(codes, scales / 40, offsets, 300, group)
    block = block_of(300, group)
    assert block is not None
    digits = (drawn * 3).round().clamp(-8, 7).to(torch.int8)
    codes = torch.stack([pack_4_bits(each, block) for each in digits])
    return CodedExperts(codes, scales / 3, offsets, 300, group, is_e2m1=kind == "e2m1")


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_meet_their_experts_codes(dtype: torch.dtype, form: Format) -> None:
    """With gaps and biases, and without."""
    for counts, gap in (([1], 0), ([0, 5, 0], 4), ([BLOCK_M, 0, BLOCK_M + 1], 0), ([0], 0)):
        starts, ends, num_rows = bounds(counts, gap)
        x = draw(num_rows, 303, dtype=dtype)[:, :300]
        weights = coded(len(counts), form)
        biases = draw(len(counts), 70, dtype=dtype, seed=2) if gap else None
        got = grouped_coded_linear(x, weights, biases, starts, ends)
        expected = grouped_coded_linear_ref(x, weights, biases, starts, ends)
        for start, end in zip(starts, ends, strict=True):
            assert_close(got[start:end], expected[start:end])


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize("form", [FORMATS[1], FORMATS[6]], ids=str)
def test_a_row_of_coded_weights_gets_the_same_bits_alone_and_among_others(form: Format) -> None:
    weights = coded(2, form)
    x = draw(BLOCK_M + 4, 300)
    starts, ends, _ = bounds([BLOCK_M + 2, 2])
    expected = grouped_coded_linear(x, weights, None, starts, ends)
    for row in (0, BLOCK_M + 1, BLOCK_M + 3):
        starts, ends, _ = bounds([1, 0] if row < BLOCK_M + 2 else [0, 1])
        alone = grouped_coded_linear(x[row : row + 1], weights, None, starts, ends)
        assert torch.equal(alone, expected[row : row + 1])
