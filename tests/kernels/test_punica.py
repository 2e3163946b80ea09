"""LoRA in Triton's interpreter against the dense reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.lora import add_lora_ref
from aserve_kernels.punica import add_lora
from tests.kernels.lora_case import SHAPES, Shape, draw_case
from tests.kernels.tolerance import assert_close


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_shape_equals_the_reference(
    dtype: torch.dtype, shape: Shape, num_tokens: int
) -> None:
    """Tokens without an adapter keep their bits."""
    case = draw_case(shape, num_tokens, dtype)
    exact, plain = case.y.double(), case.y.clone()
    add_lora_ref(exact, case.x.double(), case.slots, case.stack_as(torch.float64))
    add_lora(case.y, case.x, case.slots, case.stack)
    assert_close(case.y, exact.to(dtype))
    assert torch.equal(case.y[case.slots == 0], plain[case.slots == 0])


def test_columns_of_a_wider_tensor_are_read_by_its_stride() -> None:
    """A layer's input may be a part of a wider product, and so may its output."""
    case = draw_case(SHAPES[1], 5, torch.float32)
    expected = case.y.clone()
    add_lora_ref(expected, case.x, case.slots, case.stack)
    wide_x, wide_y = torch.zeros(5, 100), torch.zeros(5, 100)
    x, y = wide_x[:, : case.x.shape[1]], wide_y[:, : case.y.shape[1]]
    x.copy_(case.x)
    y.copy_(case.y)
    add_lora(y, x, case.slots, case.stack)
    assert_close(y, expected)
    assert not wide_y[:, case.y.shape[1] :].any()
