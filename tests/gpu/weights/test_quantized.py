"""Quantized weights whose rows are put in another order."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.weights.fp8 import Fp8Weight, rounded_to_fp8
from aserve.gpu.weights.mxfp4 import Mxfp4Weight
from aserve.gpu.weights.quantized import QuantizedWeight, reordered, rounded

ORDER = torch.tensor([1, 0, 3, 2])
BYTES = torch.randint(256, (4, 2, 16), dtype=torch.uint8)
WEIGHT = torch.randn(4, 256)


def in_blocks(num_rows: int) -> Fp8Weight:
    one = rounded_to_fp8(WEIGHT)
    return Fp8Weight(one.elements, one.scales[::num_rows], (num_rows, 256))


@pytest.mark.parametrize(
    "weight",
    [
        rounded(WEIGHT, 8),
        rounded(WEIGHT, 4),
        rounded_to_fp8(WEIGHT),
        in_blocks(2),
        Mxfp4Weight(BYTES, BYTES[:, :, 0] // 4 + 96),
    ],
    ids=["int8", "int4", "fp8", "fp8 in blocks", "mxfp4"],
)
def test_each_row_keeps_its_scales(weight: QuantizedWeight) -> None:
    found = reordered(weight, ORDER)
    assert found is not None
    assert torch.equal(found.widened(), weight.widened()[ORDER])


def test_rows_that_leave_their_block_are_widened() -> None:
    assert reordered(in_blocks(2), torch.tensor([2, 3, 0, 1])) is None
