"""The compiled rope-and-store kernel of the CPU against the torch reference."""

from __future__ import annotations

import pytest
import torch

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.ops import FEW_ELEMENTS
from aserve.gpu.kv.store import Scales, rope_then_store_kv
from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope import RopeInputs, Rotary
from aserve.gpu.layers.rope_scaling import DefaultRope

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
CPU = torch.device("cpu")
FEW_TOKENS, MANY_TOKENS = 5, FEW_ELEMENTS // 40 + 1
SCALES: Scales = (2.0, 0.5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("pool_dtype", [None, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_tokens", [0, FEW_TOKENS, MANY_TOKENS])
@pytest.mark.parametrize("way", ["as they are", "rotated", "normed"])
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_the_device_stores_what_torch_stores(
    rotary_dim: int,
    way: str,
    num_tokens: int,
    pool_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(2)
    heads = torch.randn((num_tokens, 5, 8), generator=generator).to(dtype)
    rotary = Rotary(DefaultRope(100.0), rotary_dim, max_model_len=64, dtype=dtype, device=CPU)
    norms = HeadNorms(torch.randn((4, 8), generator=generator), eps=1e-5)
    rope = RopeInputs(rotary.at(torch.arange(num_tokens) % 64), norms if way == "normed" else None)
    given = None if way == "as they are" else rope
    slots = torch.arange(num_tokens).flip(0)
    scales = SCALES if pool_dtype == torch.float8_e4m3fn else (1.0, 1.0)
    stores = CpuDevice().ops(dtype, is_deterministic=False).rope_and_store_kv, rope_then_store_kv
    pools = torch.zeros((2, 2, num_tokens, 1, 8), dtype=pool_dtype or dtype)
    got, expected = (
        store(heads, given, slots, (keys, values), scales)
        for store, (keys, values) in zip(stores, pools, strict=True)
    )
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    step = max(tolerance, 2**-6 if pool_dtype == torch.bfloat16 else 0)
    step = 2**-3 if pool_dtype == torch.float8_e4m3fn else step
    torch.testing.assert_close(pools[0].float(), pools[1].float(), rtol=step, atol=step)
