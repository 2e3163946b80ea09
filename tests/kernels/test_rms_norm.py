"""Norms of tokens, and of residual sums, against the reference and the layers in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.norm import RmsNorm
from aserve.gpu.layers.norm import add_rms_norm as add_rms_norm_layer
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


@pytest.mark.parametrize("norm", [rms_norm, lambda x, weight, eps: RmsNorm(weight, eps=eps)(x)])
def test_large_half_precision_values_do_not_overflow(norm: Callable[..., Tensor]) -> None:
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    normed = norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(normed, torch.ones_like(normed))


def test_a_token_alone_has_the_same_bits_as_among_others() -> None:
    x, weight = draw(9, 300), draw(300, seed=1)
    assert torch.equal(rms_norm(x, weight, 1e-6)[4:5], rms_norm(x[4:5], weight, 1e-6))


def test_a_residual_sum_is_rounded_before_it_is_normed() -> None:
    """256 + 1 is 256 in bfloat16: the next sublayer gets the norm of what the stream holds."""
    hidden, added = torch.tensor([[[256.0, 2.0]], [[2.0, 0.0]]], dtype=torch.bfloat16)
    weight = torch.ones(2)
    in_torch = add_rms_norm_layer(weight, eps=1e-6, scale=0.5)(hidden, added)
    for total, normed in (add_rms_norm(hidden, added, weight, 1e-6, 0.5), in_torch):
        assert torch.equal(total, hidden)
        assert torch.equal(normed, rms_norm(hidden, weight, 1e-6))
