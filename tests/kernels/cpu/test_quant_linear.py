"""Products with weights of 8 and 4 bits, and of MXFP4, against their reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aserve_kernels.cpu.quant_codes import (
    E2M1,
    INT4,
    INT8,
    INTEGERS,
    KINDS,
    CodeKind,
    QuantWeight,
    dequantized,
    pack_e2m1,
    pack_quantized,
)
from aserve_kernels.cpu.quant_linear import (
    compile_quant_linear,
    quant_linear,
    quant_linear_ref,
    rounded_inputs,
)
from aserve_kernels.cpu.quant_rows import INTEGERS_LIKE

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
# Those of E2M1 are twice the values that the specification gives for each of the 16 elements.
E2M1_CODES = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
CODES = {INT8: torch.arange(-127, 128), INT4: torch.arange(-8, 8), E2M1: E2M1_CODES}
# Outputs, inputs, groups.
SHAPES = [(1, 1, 1), (33, 130, 1), (5, 64, 2), (70, 384, 3), (32, 432, 3)]


def drawn_codes(kind: CodeKind, num_out: int, num_in: int, seed: int) -> torch.Tensor:
    """Returns numbers in the table of the kind's codes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(CODES[kind]), (num_out, num_in), generator=generator)


def packed_codes(
    kind: CodeKind,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
) -> QuantWeight:
    """Packs codes by their numbers in the table. E2M1 has no offsets, and scales are those of twice
    the elements, powers of two."""
    if kind is E2M1:
        per_group = numbers.shape[1] // 32 // scales.shape[1]
        exponents = (scales.log2() + 128).to(torch.uint8).repeat_interleave(per_group, dim=1)
        return pack_e2m1(numbers.to(torch.uint8), exponents, bias)
    codes = CODES[kind][numbers].to(torch.int8)
    return pack_quantized(codes, scales, offsets, bias, bits=kind.bits)


def drawn(
    kind: CodeKind, shape: tuple[int, int, int], *, has_offsets: bool
) -> tuple[QuantWeight, torch.Tensor]:
    """Returns a packed weight and its values, whose factors are float16. E2M1 has no offsets, and
    whole groups."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in, num_groups = shape
    if kind is E2M1:
        num_groups = -(-num_in // 32)
        num_in, has_offsets = 32 * num_groups, False
    numbers = drawn_codes(kind, num_out, num_in, seed=2)
    scales = torch.rand((num_out, num_groups), generator=generator).half().float()
    if kind is E2M1:
        scales = 2.0 ** torch.randint(-8, 0, scales.shape, generator=generator)
    offsets = torch.randn((num_out, num_groups if has_offsets else 0), generator=generator)
    offsets = offsets.half().float()
    bias = torch.randn(num_out, generator=generator)
    packed = packed_codes(kind, numbers, scales, offsets, bias)
    values = CODES[kind][numbers] * scales.repeat_interleave(num_in // num_groups, dim=1)
    if has_offsets:
        values += offsets.repeat_interleave(num_in // num_groups, dim=1)
    return packed, values


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_packed_weight_keeps_its_values(
    kind: CodeKind, shape: tuple[int, int, int], has_offsets: bool
) -> None:
    packed, values = drawn(kind, shape, has_offsets=has_offsets)
    torch.testing.assert_close(dequantized(packed), values)


@pytest.mark.parametrize("largest", [1e-20, 3e-5, 1.0, 1e20])
@pytest.mark.parametrize("bits", INTEGERS)
def test_factors_of_every_magnitude_keep_eleven_bits(bits: int, largest: float) -> None:
    compile_quant_linear(torch.float32, kind=INTEGERS[bits])
    scales = largest * torch.logspace(-7, 0, 40)[:, None]
    packed = pack_quantized(torch.ones(40, 128).char(), scales, 2 * scales, None, bits=bits)
    expected = 3 * scales.expand(40, 128)
    torch.testing.assert_close(dequantized(packed), expected, rtol=2**-11, atol=0)
    got = quant_linear(torch.ones(1, 128), packed)
    torch.testing.assert_close(got, 128 * expected[:, :1].t(), rtol=2**-10, atol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 8, 9, 300])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_shape_equals_the_reference(
    dtype: torch.dtype, kind: CodeKind, has_offsets: bool, num_tokens: int
) -> None:
    compile_quant_linear(dtype, kind=kind)
    for shape in SHAPES:
        packed, _ = drawn(kind, shape, has_offsets=has_offsets)
        generator = torch.Generator().manual_seed(1)
        wide = torch.randn((num_tokens, 2 * packed.num_in), generator=generator).to(dtype)
        x = wide[:, : packed.num_in]  # rows of another stride
        got, expected = quant_linear(x, packed), quant_linear_ref(x, packed)
        tolerance = TOLERANCES[dtype]
        limit = tolerance * float(expected.float().abs().max()) if num_tokens else 0.0
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=limit)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_input_is_off_by_half_a_step_of_its_span_at_most(kind: CodeKind) -> None:
    packed, _ = drawn(kind, (70, 384, 1), has_offsets=False)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn((50, 384), generator=generator) * torch.logspace(-3, 3, 384)
    spans = x.unflatten(1, (-1, kind.span))
    largest = np.iinfo(INTEGERS_LIKE[kind].dtype).max
    half_a_step = spans.abs().amax(dim=2, keepdim=True) / float(largest) / 2
    error = (rounded_inputs(x, packed).view_as(spans) - spans).abs()
    assert (error <= half_a_step * 1.0001).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rounding_inputs_adds_less_than_a_hundredth_to_the_error(kind: CodeKind) -> None:
    """Of normally distributed inputs and weights, relative to the product."""
    compile_quant_linear(torch.float32, kind=kind)
    packed, _ = drawn(kind, (64, 2048, 16), has_offsets=kind is INT4)
    x = torch.randn((40, 2048), generator=torch.Generator().manual_seed(7))
    exact = quant_linear_ref(x, packed, is_rounded=False)
    assert (quant_linear(x, packed) - exact).norm() <= 0.008 * exact.norm()


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_threads_share_a_product_and_change_no_bit(kind: CodeKind, num_tokens: int) -> None:
    dtype = torch.bfloat16
    compile_quant_linear(dtype, kind=kind)
    compile_quant_linear(dtype, 2, kind=kind)
    packed, _ = drawn(kind, (230, 256, 2), has_offsets=True)
    x = torch.randn((num_tokens, 256), generator=torch.Generator().manual_seed(2)).to(dtype)
    alone = quant_linear(x, packed)
    assert all(torch.equal(quant_linear(x, packed, num_workers=n), alone) for n in (2, 3))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_is_the_same_beside_others(kind: CodeKind) -> None:
    compile_quant_linear(torch.bfloat16, kind=kind)
    packed, _ = drawn(kind, (70, 384, 3), has_offsets=True)
    x = torch.randn((300, 384), generator=torch.Generator().manual_seed(3)).bfloat16()
    together = quant_linear(x, packed)
    for row in range(len(x)):
        assert torch.equal(quant_linear(x[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_large_input_hides_no_small_ones_of_other_spans(
    kind: CodeKind, dtype: torch.dtype
) -> None:
    """The weights of its own span are zero, so that only the others count."""
    compile_quant_linear(dtype, kind=kind)
    numbers = drawn_codes(kind, 70, 384, seed=4)
    first = 200 // kind.span * kind.span
    numbers[:, first : first + kind.span] = int((CODES[kind] == 0).int().argmax())
    generator = torch.Generator().manual_seed(4)
    scales = 2.0 ** torch.randint(-8, 0, (70, 1), generator=generator)
    packed = packed_codes(kind, numbers, scales, scales[:, :0], None)
    x = torch.randn((3, 384), generator=generator).to(dtype)
    x[:, 200] = 2.0**20
    expected = quant_linear_ref(x, packed)
    limit = TOLERANCES[dtype] * float(expected.float().abs().max())
    torch.testing.assert_close(
        quant_linear(x, packed), expected, rtol=TOLERANCES[dtype], atol=limit
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sums_of_the_largest_codes_and_inputs_overflow_nowhere(kind: CodeKind, sign: int) -> None:
    """Products of bytes are added in 16 bits where the processor has no other way."""
    compile_quant_linear(torch.float32, kind=kind)
    numbers = torch.full((40, 512), int(CODES[kind].argmax()))
    numbers[20:] = CODES[kind].argmin()
    packed = packed_codes(kind, numbers, torch.ones(40, 1), torch.ones(40, 0), None)
    x = torch.full((5, 512), 3.0 * sign)
    expected = 3.0 * sign * CODES[kind][numbers].sum(dim=1).float().expand(5, 40)
    torch.testing.assert_close(quant_linear(x, packed), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_not_finite_spoils_its_own_row_alone(kind: CodeKind, num_tokens: int) -> None:
    dtype = torch.bfloat16
    compile_quant_linear(dtype, kind=kind)
    packed, _ = drawn(kind, (70, 384, 3), has_offsets=True)
    x = torch.randn((num_tokens, 384), generator=torch.Generator().manual_seed(5)).to(dtype)
    expected = quant_linear(x, packed)
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = x.clone()
        spoiled[num_tokens // 2, 130] = bad
        got = quant_linear(spoiled, packed)
        is_other = torch.arange(num_tokens) != num_tokens // 2
        assert not torch.isfinite(got[num_tokens // 2]).any()
        assert torch.equal(got[is_other], expected[is_other])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_of_zeros_and_of_tiny_numbers(kind: CodeKind, dtype: torch.dtype) -> None:
    compile_quant_linear(dtype, kind=kind)
    packed, _ = drawn(kind, (70, 384, 3), has_offsets=True)
    x = torch.zeros((3, 384), dtype=dtype)
    x[1], x[2] = 1e-38, -1e-38
    bias = torch.from_numpy(packed.bias).to(dtype)
    assert torch.equal(quant_linear(x, packed), bias.expand(3, -1))
