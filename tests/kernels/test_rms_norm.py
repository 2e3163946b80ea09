"""Norms of tokens, and of residual sums, against the reference and the layers in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.mlp import GatedActivation
from aserve.gpu.layers.norm import RmsNorm
from aserve.gpu.layers.norm import add_rms_norm as add_rms_norm_layer
from aserve_kernels.gated_mul import BLOCK, KINDS, gated_mul, gated_mul_ref
from aserve_kernels.reference import rms_norm_ref
from aserve_kernels.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm
from tests.kernels.tolerance import TOLERANCES, assert_close, draw

SHAPES = [(0, 8), (1, 1), (3, 100), (2, 4097)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_norm_is_that_of_torch(is_wide: bool, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = draw(shape[0], shape[1] + 3, dtype=dtype)[:, : shape[1]]
    weight = draw(shape[1], dtype=torch.float32 if is_wide else dtype, seed=1)
    got = rms_norm(x, weight, 1e-5)
    assert got.is_contiguous()
    assert_close(got, rms_norm_ref(x, weight, 1e-5))
    assert_close(got, RmsNorm(weight, eps=1e-5)(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_residual_sum_is_rounded_and_then_normed(
    scale: float, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    hidden, added = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight = draw(shape[1], dtype=dtype, seed=2)
    total, normed = add_rms_norm(hidden, added, weight, 1e-5, scale)
    of_layer = add_rms_norm_layer(weight, eps=1e-5, scale=scale)(hidden, added)
    for expected in (add_rms_norm_ref(hidden, added, weight, 1e-5, scale), of_layer):
        assert_close(total, expected[0])
        assert_close(normed, expected[1])


def test_a_weight_wider_than_its_input_is_not_rounded_before_it_multiplies() -> None:
    """1.001 is 1.0 in bfloat16; times 256 or so the difference shows."""
    x = torch.tensor([[3.0, -4.0, 250.0, 256.0]], dtype=torch.bfloat16)
    weight = torch.full((4,), 1.004)
    normed = RmsNorm(weight, eps=1e-6)(x)
    assert normed.dtype == torch.bfloat16
    wide = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(normed, (wide * weight).to(torch.bfloat16))
    assert not torch.equal(normed, RmsNorm(weight.to(torch.bfloat16), eps=1e-6)(x))


@pytest.mark.parametrize("norm", [rms_norm, lambda x, weight, eps: RmsNorm(weight, eps=eps)(x)])
def test_large_half_precision_values_do_not_overflow(norm: Callable[..., Tensor]) -> None:
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    normed = norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(normed, torch.ones_like(normed))


def test_a_residual_sum_is_rounded_before_it_is_normed() -> None:
    """256 + 1 is 256 in bfloat16: the next sublayer gets the norm of what the stream holds."""
    hidden, added = torch.tensor([[[256.0, 2.0]], [[2.0, 0.0]]], dtype=torch.bfloat16)
    weight = torch.ones(2)
    in_torch = add_rms_norm_layer(weight, eps=1e-6, scale=0.5)(hidden, added)
    for total, normed in (add_rms_norm(hidden, added, weight, 1e-6, 0.5), in_torch):
        assert torch.equal(total, hidden)
        assert torch.equal(normed, rms_norm(hidden, weight, 1e-6))


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, BLOCK), (2, BLOCK + 1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("activation", KINDS)
def test_every_shape_equals_the_reference(
    activation: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    joined = 3 * draw(shape[0], 2 * shape[1], dtype=dtype)
    got = gated_mul(joined, activation)
    assert_close(got, gated_mul_ref(joined, activation))
    assert_close(got, GatedActivation(activation)(joined))


def test_bfloat16_is_rounded_where_torch_rounds_it() -> None:
    """All but one bit in a hundred are the same."""
    joined = 3 * draw(4, 2 * 500, dtype=torch.bfloat16)
    differs = gated_mul(joined, "silu") != gated_mul_ref(joined, "silu")
    assert differs.sum() <= 20
