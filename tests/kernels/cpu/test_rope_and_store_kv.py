"""QK norm, RoPE and the KV store on the CPU against the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from aserve_kernels.cpu.rope_and_store_kv import compile_rope_and_store_kv, rope_and_store_kv
from aserve_kernels.reference import rope_and_store_kv_ref
from tests.kernels.rope_case import (
    SHAPES,
    assert_equals_reference,
    assert_rounds_as_torch,
    assert_shares_a_slot,
    draw_cos_sin,
    draw_slots,
    make_pools,
)
from tests.kernels.tolerance import draw

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    for dtype in DTYPES:
        compile_rope_and_store_kv(dtype)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 3, 130, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_shape_equals_the_reference(
    num_workers: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    num_tokens: int,
    *,
    is_normed: bool,
) -> None:
    kernel = partial(rope_and_store_kv, num_workers=num_workers)
    assert_equals_reference(kernel, shape, num_tokens, dtype, is_normed=is_normed)


def test_heads_without_a_norm_are_rounded_as_in_torch() -> None:
    assert_rounds_as_torch(rope_and_store_kv)


def test_tokens_of_one_slot_disturb_no_other() -> None:
    assert_shares_a_slot(rope_and_store_kv)


def test_normed_heads_are_rounded_where_torch_rounds_them() -> None:
    """All but a few bits in ten thousand are the same."""
    heads, cos_sin = draw(40, 5, 32).bfloat16(), draw_cos_sin(40, 32, torch.bfloat16)
    pools, expected = (make_pools(1, 32, torch.bfloat16) for _ in range(2))
    given: dict[str, Any] = {"cos_sin": cos_sin, "weight": draw(4, 32), "eps": 1e-6}
    got = rope_and_store_kv(heads, draw_slots(40), pools, **given)
    wanted = rope_and_store_kv_ref(heads, draw_slots(40), expected, **given)
    assert (got != wanted).sum() <= 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_pools_of_bfloat16_hold_the_rounded_keys_and_values_of_float32_heads(
    num_workers: int,
) -> None:
    heads, cos_sin = draw(17, 5, 32), draw_cos_sin(17, 32, torch.float32)
    exact, stored = (make_pools(1, 32, dtype) for dtype in (torch.float32, torch.bfloat16))
    store = partial(rope_and_store_kv, heads, draw_slots(17), cos_sin=cos_sin)
    queries = store(exact, num_workers=num_workers)
    assert torch.equal(store(stored, num_workers=num_workers), queries)
    for wide, narrow in zip(exact, stored, strict=True):
        assert torch.equal(wide.bfloat16(), narrow)
