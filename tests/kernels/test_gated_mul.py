"""Gated activations against the reference and the layer in torch."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.layers.mlp import ACTIVATIONS, GatedActivation
from aserve_kernels.gated_mul import BLOCK, KINDS, gated_mul, gated_mul_ref
from tests.kernels.tolerance import TOLERANCES, assert_close, draw


def test_every_activation_of_the_models_has_a_kernel() -> None:
    assert set(KINDS) == set(ACTIVATIONS)


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
