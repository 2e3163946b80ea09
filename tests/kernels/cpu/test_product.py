"""Products that are called by their address, as the forwards call them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from aserve_kernels.cpu.bf16 import Float32s, Floats, as_array
from aserve_kernels.cpu.decoder_layers import Records
from aserve_kernels.cpu.gemm import pack, packed_linear_ref, tiles_product
from aserve_kernels.cpu.product import PRODUCT, multiply_by
from aserve_kernels.cpu.quant_codes import KINDS, CodeKind, QuantWeight
from aserve_kernels.cpu.quant_linear import codes_product, quant_linear_ref
from tests.kernels.cpu.test_quant_linear import drawn

DTYPES = (torch.float32, torch.bfloat16)
SHAPE = (70, 384, 3)  # outputs, inputs, groups


@njit(nogil=True)
def _multiply(layers: Records, x: Floats, out: Float32s, num_workers: int) -> None:
    for worker in range(num_workers):
        multiply_by(layers[0], x, out, worker, num_workers)


def product(fields: tuple[float, ...], x: Tensor, num_workers: int) -> Tensor:
    layers = np.array([fields], PRODUCT)
    out = torch.full((len(x), SHAPE[0]), torch.nan)
    _multiply(layers, as_array(x), out.numpy(), num_workers)
    return out


def coded_fields(weight: QuantWeight, dtype: torch.dtype) -> tuple[float, ...]:
    """The fields of a layer with this weight, of SHAPE."""
    addresses = [array.ctypes.data for array in (weight.codes, weight.bias, weight.factors)]
    numbers = (SHAPE[1], SHAPE[0], weight.group, weight.per_group, float(weight.unit))
    return (codes_product(dtype, weight.kind).address, *addresses, *numbers)


def inputs(num_tokens: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((num_tokens, SHAPE[1]), generator=generator).to(dtype)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_workers_write_the_product_with_tiles(
    dtype: torch.dtype, stored: torch.dtype, num_tokens: int, num_workers: int
) -> None:
    weight = torch.randn(SHAPE[:2], generator=torch.Generator().manual_seed(0)).to(stored)
    packed, bias = pack(weight), np.ones(SHAPE[0], np.float32)
    addresses = (tiles_product(dtype, stored).address, packed.ctypes.data, bias.ctypes.data, 0)
    fields = (*addresses, SHAPE[1], SHAPE[0], 0, 0, 0.0)
    x = inputs(num_tokens, dtype)
    expected = packed_linear_ref(x, packed, bias).float()
    got = product(fields, x, num_workers)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_workers_write_the_product_with_codes(
    dtype: torch.dtype, kind: CodeKind, has_offsets: bool, num_tokens: int, num_workers: int
) -> None:
    weight, _ = drawn(kind, SHAPE, has_offsets=has_offsets)
    x = inputs(num_tokens, dtype)
    expected = quant_linear_ref(x.float(), weight)
    spread = float(expected.abs().max())
    got = product(coded_fields(weight, dtype), x, num_workers)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7 * spread)
