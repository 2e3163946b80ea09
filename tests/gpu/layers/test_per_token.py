"""With --deterministic, a token's matrix product does not depend on the other tokens, and its
activation does not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.linear import per_token, prepare_packed
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare, prepare
from aserve.gpu.layers.mlp import ACTIVATIONS

CPU = torch.device("cpu")


def counting(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """A product whose results depend on the number of rows, as a library's may."""

    def product(x: Tensor, /) -> Tensor:
        return linear(x) + len(x)

    return product


@pytest.mark.parametrize("form", [prepare, prepare_packed, counting])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_every_token_gets_what_it_gets_alone(num_tokens: int, form: Prepare) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 50, generator=generator) for n in (num_tokens, 30))
    op = per_token(form)(Linear(weight, weight[:, 0]), CPU, dtype=torch.float32)
    got = op(x)
    assert got.shape == (num_tokens, 30)
    alone = form(Linear(weight, weight[:, 0]), CPU, dtype=torch.float32)
    for token in range(num_tokens):
        assert torch.equal(got[token : token + 1], alone(x[token : token + 1].clone()))


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_token_is_activated_as_it_is_alone(activation: str) -> None:
    """A vectorised loop computes the last elements of each thread's share one by one."""
    gated = CpuDevice().ops(torch.float32, is_deterministic=True).elementwise.gated(activation)
    joined = 4 * torch.randn(101, 2 * 1000, generator=torch.Generator().manual_seed(0))
    together = gated(joined)
    for token in range(len(joined)):
        assert torch.equal(gated(joined[token : token + 1]), together[token : token + 1])
    assert gated(joined[:0]).shape == (0, 1000)
