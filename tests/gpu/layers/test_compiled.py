"""The compiled layers of the CPU against torch, for any number of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.ops import FEW_ELEMENTS
from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.gpu.layers.rope import RopeInputs

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
FEW_TOKENS, MANY_TOKENS = 5, FEW_ELEMENTS // 24 + 1


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, FEW_TOKENS, MANY_TOKENS])
@pytest.mark.parametrize("scale", [None, 1.0, 0.22])
def test_norms_and_those_of_residual_sums_are_those_of_torch(
    scale: float | None, num_tokens: int, dtype: torch.dtype
) -> None:
    hidden, added = draw(2, num_tokens, 40, dtype=dtype)[:, :, :24]
    weight = draw(24, dtype=dtype)

    def normed(ops: Elementwise) -> tuple[Tensor, Tensor]:
        if scale is None:
            return hidden, ops.norm(weight, eps=1e-5)(hidden)
        return ops.add_norm(weight, eps=1e-5, scale=scale)(hidden, added)

    got = normed(CpuDevice().ops(dtype, is_deterministic=False).elementwise)
    expected = normed(PLAIN)
    assert torch.equal(got[0], expected[0])
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got[1], expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_token_gets_the_bits_of_one_alone_where_they_must_not_change(dtype: torch.dtype) -> None:
    """Among more than are compiled for: from there on float32's last digits are others."""
    num_tokens, hidden = 1 + FEW_ELEMENTS // 512, 512
    x, weight = draw(num_tokens, hidden, dtype=dtype), draw(hidden, dtype=dtype)
    ops = CpuDevice().ops(dtype, is_deterministic=True)
    way, store = ops.elementwise, ops.rope_and_store_kv
    norm, add_norm = way.norm(weight, eps=1e-6), way.add_norm(weight, eps=1e-6, scale=0.22)
    norms = HeadNorms(draw(5, 64, dtype=dtype), eps=1e-6)
    cos_sin = draw(num_tokens, 64, dtype=dtype)

    def computed(tokens: slice) -> Tensor:
        part = x[tokens]
        heads, pools = part.view(-1, 8, 64), draw(2, len(part), 3, 64, dtype=dtype)
        rope, slots = RopeInputs(cos_sin[tokens], norms), torch.arange(len(part))
        queries = store(heads, rope, slots, (pools[0], pools[1]), (1.0, 1.0))
        parts = (norm(part), *add_norm(part, part), queries, *pools)
        return torch.cat([each.flatten(1) for each in parts], dim=1)

    every = computed(slice(None))
    for token in (0, 1, num_tokens // 2, num_tokens - 1):
        assert torch.equal(computed(slice(token, token + 1))[0], every[token])
