"""LoRA for few tokens in compiled code against the dense reference."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.cpu.lora import add_lora, compile_lora
from aserve_kernels.lora import add_lora_ref
from tests.kernels.lora_case import SHAPES, Shape, draw_case
from tests.kernels.tolerance import assert_close

VARIANTS = [(torch.float32, 1), (torch.bfloat16, 3)]


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "num_threads"), VARIANTS)
def test_every_shape_equals_the_reference(
    dtype: torch.dtype,
    shape: Shape,
    num_tokens: int,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    compile_lora(dtype, num_threads)
    case = draw_case(shape, num_tokens, dtype)
    exact = case.y.double()
    add_lora_ref(exact, case.x.double(), case.slots, case.stack_as(torch.float64))
    plain = case.y.clone()
    add_lora(case.y, case.x, case.slots, case.stack)
    assert_close(case.y, exact.to(dtype))
    assert torch.equal(case.y[case.slots == 0], plain[case.slots == 0])


@pytest.mark.parametrize(("dtype", "num_threads"), VARIANTS)
def test_a_tokens_result_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    compile_lora(dtype, num_threads)
    case = draw_case(SHAPES[-1], 9, dtype)
    alone = case.y.clone()
    for token in range(9):
        part = slice(token, token + 1)
        add_lora(alone[part], case.x[part], case.slots[part], case.stack)
    add_lora(case.y, case.x, case.slots, case.stack)
    assert torch.equal(alone, case.y)
