"""Small functions of compiled code, where the tests of kernels do not show all of them.
test_precompile.py runs the plain functions that stand for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from aserve_kernels.cpu.bf16 import Float32s, Floats, narrow, widen
from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.memory import array_at
from aserve_kernels.cpu.pair_rows import load_even, load_odd, pair_dot_products, store_pairs
from aserve_kernels.cpu.processor import usable
from aserve_kernels.cpu.simd import LANES, load, maximum, reduce_max, store

VALUES = torch.tensor(
    [0.0, -0.0, 1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, -3.4e38, 1e-40, torch.inf, -torch.inf]
)


@njit()
def narrowed(source: Float32s, target: Floats) -> None:
    narrow(source, target)


@njit()
def widened(source: Floats, target: Float32s) -> None:
    widen(source, target)


def test_narrowing_rounds_as_torch_does_and_widening_is_exact() -> None:
    bits, values = np.empty(len(VALUES), np.uint16), np.empty(len(VALUES), np.float32)
    narrowed(VALUES.numpy(), bits)
    assert (bits == VALUES.to(torch.bfloat16).view(torch.uint16).numpy()).all()
    widened(bits, values)
    assert (values == VALUES.to(torch.bfloat16).float().numpy()).all()


def test_a_narrowed_nan_stays_one() -> None:
    """Its low bits alone may say that it is one: cut off, they would leave an infinity."""
    values = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    bits = np.empty(2, np.uint16)
    narrowed(values, bits)
    assert torch.from_numpy(bits).view(torch.bfloat16).isnan().all()


@njit()
def compared(a: Float32s, b: Float32s, target: Float32s) -> None:
    """target[:16] = the greater of a and b, lane by lane; target[16] = the greatest of all."""
    lanes = maximum(load(a, 0), load(b, 0))
    store(lanes, target, 0)
    target[LANES] = reduce_max(lanes)


@njit()
def doubled(address: int, like: np.ndarray) -> float:
    table = array_at(address, (2, 3), like)
    table[1, 2] *= 2
    return table[1, 2]


@njit()
def multiplied(x: Floats, rows: Floats, starts: Int64s, target: Float32s) -> None:
    store(pair_dot_products(x, 32, rows, starts, 1, 64), target, 0)


@njit()
def divided(rows: Floats, target: Float32s) -> None:
    store(load_even(rows, 3), target, 0)
    store(load_odd(rows, 3), target, LANES)


@njit()
def joined(source: Float32s, target: Floats) -> None:
    store_pairs(load(source, 0), load(source, LANES), target, 1)


def test_pairs_are_rounded_to_bfloat16_and_stored_in_turn() -> None:
    source = torch.randn(2 * LANES, generator=torch.Generator().manual_seed(0))
    source[: len(VALUES)] = VALUES
    source[-1] = torch.nan
    target = torch.zeros(2 * LANES + 2, dtype=torch.bfloat16)
    joined(source.numpy(), target.view(torch.uint16).numpy())
    expected = source.view(2, LANES).T.reshape(-1).bfloat16()
    assert torch.equal(target[1:-1].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert target[0] == target[-1] == 0


def test_rows_of_bfloat16_are_multiplied_where_they_stand() -> None:
    generator = torch.Generator().manual_seed(0)
    x, rows = (torch.randn(n, generator=generator).bfloat16() for n in (96, 400))
    starts, target = np.arange(20, 37, dtype=np.int64)[::-1].copy(), np.empty(2 * LANES, np.float32)
    multiplied(x.view(torch.uint16).numpy(), rows.view(torch.uint16).numpy(), starts, target)
    expected = [float(x[32:].float() @ rows[at : at + 64].float()) for at in starts[1:]]
    np.testing.assert_allclose(target[:LANES], expected, rtol=1e-5, atol=1e-5)
    divided(rows.view(torch.uint16).numpy(), target)
    wide = rows[3:35].float().numpy()
    assert target.tolist() == [*wide[::2].tolist(), *wide[1::2].tolist()]


@pytest.mark.parametrize(
    ("has_tiles", "features"),
    [(True, "+avx2,+amx-bf16,-amx-fp16"), (False, "+avx2,-amx-bf16,-amx-fp16")],
)
def test_code_has_matrix_instructions_only_where_the_system_lets_it(
    has_tiles: bool, features: str
) -> None:
    assert usable("+avx2,+amx-bf16,-amx-fp16", has_tiles=has_tiles) == features
