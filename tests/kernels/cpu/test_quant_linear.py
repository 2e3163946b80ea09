"""Products with weights of 8 and 4 bits against their reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.cpu.quant_linear import (
    MAX_TILE_ROWS,
    QuantWeight,
    compile_quant_linear,
    dequantized,
    pack_quantized,
    quant_linear,
    quant_linear_ref,
)

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
RANGES = {8: (-127, 128), 4: (-8, 8)}
SHAPES = [(1, 1, 1), (33, 130, 1), (5, 64, 2), (70, 384, 3)]  # outputs, inputs, groups


def drawn(
    bits: int, shape: tuple[int, int, int], *, has_offsets: bool
) -> tuple[QuantWeight, torch.Tensor]:
    """Returns a packed weight and its values."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in, num_groups = shape
    codes = torch.randint(*RANGES[bits], (num_out, num_in), generator=generator, dtype=torch.int8)
    scales = torch.rand((num_out, num_groups), generator=generator)
    offsets = torch.randn((num_out, num_groups if has_offsets else 0), generator=generator)
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


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, MAX_TILE_ROWS, MAX_TILE_ROWS + 1, 300])
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
def test_a_row_is_the_same_beside_few_others(bits: int) -> None:
    compile_quant_linear(torch.bfloat16, bits=bits)
    packed, _ = drawn(bits, (70, 384, 3), has_offsets=True)
    x = torch.randn((MAX_TILE_ROWS, 384), generator=torch.Generator().manual_seed(3)).bfloat16()
    together = quant_linear(x, packed)
    for row in range(len(x)):
        assert torch.equal(quant_linear(x[row : row + 1], packed)[0], together[row])
