"""Products with weights of 8 and 4 bits, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aserve_kernels.weight_only_linear import (
    BLOCK_M,
    E2M1,
    CodedMatrix,
    block_of,
    pack_4_bits,
    unpack_4_bits,
    weight_only_linear,
    weight_only_linear_ref,
    widened_ref,
)
from tests.kernels.tolerance import TOLERANCES, assert_close, draw

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """The weight: its kind, sizes, and how many inputs and outputs share a scale."""

    kind: str
    num_outs: int
    num_ins: int
    group: int
    rows: int = 1
    has_offsets: bool = False


CASES = [
    Case("e4m3", 100, 70, 70),  # one scale per output
    Case("e4m3", 130, 300, 128, rows=128),  # blocks
    Case("e4m3", 7, 192, 64, rows=5),
    Case("int8", 33, 100, 100),
    Case("int4", 65, 128, 32, has_offsets=True),
    Case("int4", 40, 300, 128),
    Case("int4", 70, 192, 64, has_offsets=True),
    Case("int4", 20, 50, 50, has_offsets=True),  # one group that is no whole block
]


def matrix_of(case: Case) -> CodedMatrix:
    generator = torch.Generator().manual_seed(5)
    shape, num_groups = (case.num_outs, case.num_ins), -(-case.num_ins // case.group)
    if case.kind == "e4m3":
        codes = torch.randn(shape, generator=generator).to(FP8)
    else:
        bound = 128 if case.kind == "int8" else 8
        codes = torch.randint(-bound, bound, shape, generator=generator).to(torch.int8)
    if case.kind == "int4":
        block = block_of(case.num_ins, case.group)
        assert block is not None
        codes = pack_4_bits(codes, block)
    num_scales = -(-case.num_outs // case.rows)
    scales = torch.rand((num_groups, num_scales), generator=generator) / case.num_ins**0.5
    offsets = None
    if case.has_offsets:
        offsets = torch.randn((num_groups, case.num_outs), generator=generator) / 8
    return CodedMatrix(codes, scales, offsets, case.num_ins, case.group, case.rows)


def assert_product(
    x: Tensor, weight: CodedMatrix, bias: Tensor | None, *, is_invariant: bool = False
) -> None:
    got = weight_only_linear(x, weight, bias, is_invariant=is_invariant)
    assert_close(got, weight_only_linear_ref(x, weight, bias))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17])
def test_a_product_is_that_of_the_weights_that_the_codes_stand_for(
    num_tokens: int, dtype: torch.dtype, case: Case
) -> None:
    x = draw(num_tokens, case.num_ins + 3, dtype=dtype)[:, : case.num_ins] / 4
    bias = draw(case.num_outs, dtype=dtype, seed=2)
    assert_product(x, matrix_of(case), bias)


@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_more_than_a_tile_of_tokens_without_a_bias(case: Case) -> None:
    assert_product(draw(BLOCK_M + 3, case.num_ins), matrix_of(case), None)


def test_each_element_of_mxfp4_is_decoded_exactly() -> None:
    """The smallest one is a float16 without a leading bit before it is scaled."""
    digits = torch.arange(16, dtype=torch.int8)[:, None]
    weight = CodedMatrix(pack_4_bits(digits - 8, 128), torch.ones(1, 16), None, 1, 32, is_e2m1=True)
    expected = torch.tensor([*E2M1, *(-value for value in E2M1)])
    for dtype in TOLERANCES:
        got = weight_only_linear(torch.ones(1, 1, dtype=dtype), weight)
        assert torch.equal(got[0], expected.to(dtype))


def test_each_element_of_fp8_is_decoded_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = every[~every.float().isnan()][:, None].contiguous()
    weight = CodedMatrix(numbers, torch.ones(1, len(numbers)), None, 1, 1)
    for dtype in TOLERANCES:
        got = weight_only_linear(torch.ones(1, 1, dtype=dtype), weight)
        assert torch.equal(got[0], numbers[:, 0].to(dtype))


def test_codes_of_4_bits_are_unpacked_as_they_were_packed() -> None:
    codes = torch.randint(-8, 8, (3, 70), dtype=torch.int8)
    for block in (32, 64, 128):
        assert torch.equal(unpack_4_bits(pack_4_bits(codes, block), 70, block), codes)


def test_the_widened_weight_is_that_of_the_formula() -> None:
    """Element by element, without the reference's indexing."""
    case = Case("int4", 3, 64, 32, has_offsets=True)
    weight = matrix_of(case)
    codes = unpack_4_bits(weight.codes, 64, 32)
    assert weight.offsets is not None
    for output, place in ((0, 0), (1, 31), (2, 32), (0, 63)):
        group = place // 32
        expected = weight.scales[group, output] * codes[output, place]
        expected = expected + weight.offsets[group, output]
        assert torch.equal(widened_ref(weight)[output, place], expected)


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_a_token_gets_the_same_bits_alone_and_among_any_number(case: Case) -> None:
    x, weight = draw(BLOCK_M + 3, case.num_ins, dtype=torch.bfloat16), matrix_of(case)
    expected = weight_only_linear(x, weight, is_invariant=True)
    parts = [weight_only_linear(part, weight, is_invariant=True) for part in x.split([1, 2, 64])]
    assert torch.equal(torch.cat(parts), expected)
