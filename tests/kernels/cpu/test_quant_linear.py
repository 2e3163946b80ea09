"""Products with weights of 8 and 4 bits against their reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aserve_kernels.cpu.quant_codes import (
    QuantWeight,
    dequantized,
    pack_quantized,
)
from aserve_kernels.cpu.quant_linear import (
    compile_quant_linear,
    quant_linear,
    quant_linear_ref,
    rounded_inputs,
)
from aserve_kernels.cpu.quant_rows import INTEGERS_LIKE, SPANS

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
RANGES = {8: (-127, 128), 4: (-8, 8)}
# Outputs, inputs, groups.
SHAPES = [(1, 1, 1), (33, 130, 1), (5, 64, 2), (70, 384, 3), (32, 432, 3)]


def drawn(
    bits: int, shape: tuple[int, int, int], *, has_offsets: bool
) -> tuple[QuantWeight, torch.Tensor]:
    """Returns a packed weight and its values, whose factors are float16."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in, num_groups = shape
    codes = torch.randint(*RANGES[bits], (num_out, num_in), generator=generator, dtype=torch.int8)
    scales = torch.rand((num_out, num_groups), generator=generator).half().float()
    offsets = torch.randn((num_out, num_groups if has_offsets else 0), generator=generator)
    offsets = offsets.half().float()
    bias = torch.randn(num_out, generator=generator)
    packed = pack_quantized(codes, scales, offsets, bias, bits=bits)
    values = codes * scales.repeat_interleave(num_in // num_groups, dim=1)
    if has_offsets:
        values += offsets.repeat_interleave(num_in // num_groups, dim=1)
    return packed, values


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", RANGES)
def test_a_packed_weight_keeps_its_values(
    bits: int, shape: tuple[int, int, int], has_offsets: bool
) -> None:
    packed, values = drawn(bits, shape, has_offsets=has_offsets)
    torch.testing.assert_close(dequantized(packed), values)


@pytest.mark.parametrize("largest", [1e-20, 3e-5, 1.0, 1e20])
@pytest.mark.parametrize("bits", RANGES)
def test_factors_of_every_magnitude_keep_eleven_bits(bits: int, largest: float) -> None:
    compile_quant_linear(torch.float32, bits=bits)
    scales = largest * torch.logspace(-7, 0, 40)[:, None]
    packed = pack_quantized(torch.ones(40, 128).char(), scales, 2 * scales, None, bits=bits)
    expected = 3 * scales.expand(40, 128)
    torch.testing.assert_close(dequantized(packed), expected, rtol=2**-11, atol=0)
    got = quant_linear(torch.ones(1, 128), packed)
    torch.testing.assert_close(got, 128 * expected[:, :1].t(), rtol=2**-10, atol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 8, 9, 300])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("bits", RANGES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_shape_equals_the_reference(
    dtype: torch.dtype, bits: int, has_offsets: bool, num_tokens: int
) -> None:
    compile_quant_linear(dtype, bits=bits)
    for shape in SHAPES:
        packed, _ = drawn(bits, shape, has_offsets=has_offsets)
        generator = torch.Generator().manual_seed(1)
        wide = torch.randn((num_tokens, 2 * shape[1]), generator=generator).to(dtype)
        x = wide[:, : shape[1]]  # rows of another stride
        got, expected = quant_linear(x, packed), quant_linear_ref(x, packed)
        tolerance = TOLERANCES[dtype]
        limit = tolerance * float(expected.float().abs().max()) if num_tokens else 0.0
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=limit)


@pytest.mark.parametrize("bits", RANGES)
def test_an_input_is_off_by_half_a_step_of_its_span_at_most(bits: int) -> None:
    packed, _ = drawn(bits, (70, 384, 1), has_offsets=False)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn((50, 384), generator=generator) * torch.logspace(-3, 3, 384)
    spans = x.unflatten(1, (-1, SPANS[bits]))
    largest = np.iinfo(INTEGERS_LIKE[bits].dtype).max
    half_a_step = spans.abs().amax(dim=2, keepdim=True) / float(largest) / 2
    error = (rounded_inputs(x, packed).view_as(spans) - spans).abs()
    assert (error <= half_a_step * 1.0001).all()


@pytest.mark.parametrize("bits", RANGES)
def test_rounding_inputs_adds_less_than_a_hundredth_to_the_error(bits: int) -> None:
    """Of normally distributed inputs and weights, relative to the product."""
    compile_quant_linear(torch.float32, bits=bits)
    packed, _ = drawn(bits, (64, 2048, 16), has_offsets=bits == 4)
    x = torch.randn((40, 2048), generator=torch.Generator().manual_seed(7))
    exact = quant_linear_ref(x, packed, is_rounded=False)
    assert (quant_linear(x, packed) - exact).norm() <= 0.008 * exact.norm()


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("bits", RANGES)
def test_threads_share_a_product_and_change_no_bit(bits: int, num_tokens: int) -> None:
    dtype = torch.bfloat16
    compile_quant_linear(dtype, bits=bits)
    compile_quant_linear(dtype, 2, bits=bits)
    packed, _ = drawn(bits, (230, 256, 2), has_offsets=True)
    x = torch.randn((num_tokens, 256), generator=torch.Generator().manual_seed(2)).to(dtype)
    alone = quant_linear(x, packed)
    assert all(torch.equal(quant_linear(x, packed, num_workers=n), alone) for n in (2, 3))


@pytest.mark.parametrize("bits", RANGES)
def test_a_row_is_the_same_beside_others(bits: int) -> None:
    compile_quant_linear(torch.bfloat16, bits=bits)
    packed, _ = drawn(bits, (70, 384, 3), has_offsets=True)
    x = torch.randn((300, 384), generator=torch.Generator().manual_seed(3)).bfloat16()
    together = quant_linear(x, packed)
    for row in range(len(x)):
        assert torch.equal(quant_linear(x[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bits", RANGES)
def test_a_large_input_hides_no_small_ones_of_other_spans(bits: int, dtype: torch.dtype) -> None:
    """The weights of its own span are zero, so that only the others count."""
    compile_quant_linear(dtype, bits=bits)
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(*RANGES[bits], (70, 384), generator=generator, dtype=torch.int8)
    first = 200 // SPANS[bits] * SPANS[bits]
    codes[:, first : first + SPANS[bits]] = 0
    scales = torch.rand((70, 1), generator=generator)
    packed = pack_quantized(codes, scales, scales[:, :0], None, bits=bits)
    x = torch.randn((3, 384), generator=generator).to(dtype)
    x[:, 200] = 2.0**20
    expected = quant_linear_ref(x, packed)
    limit = TOLERANCES[dtype] * float(expected.float().abs().max())
    torch.testing.assert_close(
        quant_linear(x, packed), expected, rtol=TOLERANCES[dtype], atol=limit
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", RANGES)
def test_sums_of_the_largest_codes_and_inputs_overflow_nowhere(bits: int, sign: int) -> None:
    """Products of bytes are added in 16 bits where the processor has no other way."""
    compile_quant_linear(torch.float32, bits=bits)
    low, high = RANGES[bits]
    codes = torch.full((40, 512), high - 1, dtype=torch.int8)
    codes[20:] = low
    packed = pack_quantized(codes, torch.ones(40, 1), torch.ones(40, 0), None, bits=bits)
    x = torch.full((5, 512), 3.0 * sign)
    expected = 3.0 * sign * codes.sum(dim=1).float().expand(5, 40)
    torch.testing.assert_close(quant_linear(x, packed), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("bits", RANGES)
def test_what_is_not_finite_spoils_its_own_row_alone(bits: int, num_tokens: int) -> None:
    dtype = torch.bfloat16
    compile_quant_linear(dtype, bits=bits)
    packed, _ = drawn(bits, (70, 384, 3), has_offsets=True)
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
@pytest.mark.parametrize("bits", RANGES)
def test_rows_of_zeros_and_of_tiny_numbers(bits: int, dtype: torch.dtype) -> None:
    compile_quant_linear(dtype, bits=bits)
    packed, _ = drawn(bits, (70, 384, 3), has_offsets=True)
    x = torch.zeros((3, 384), dtype=dtype)
    x[1], x[2] = 1e-38, -1e-38
    bias = torch.from_numpy(packed.bias).to(dtype)
    assert torch.equal(quant_linear(x, packed), bias.expand(3, -1))
