"""A token's product does not depend on the others, whatever the form of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.each_alone import each_alone
from aserve.gpu.layers.linear import Linear, LinearOp, Prepare, prepare
from aserve.gpu.layers.packed_linear import prepare_packed

CPU = torch.device("cpu")


def counting(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
    """Results differ with the number of rows, as those of a library may in their last digits."""

    def product(x: Tensor, /) -> Tensor:
        return linear(x) + len(x)

    return product


@pytest.mark.parametrize("form", [prepare, prepare_packed, counting])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_every_token_gets_what_it_gets_alone(num_tokens: int, form: Prepare) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 50, generator=generator) for n in (num_tokens, 30))
    op = each_alone(form)(Linear(weight, weight[:, 0]), CPU, dtype=torch.float32)
    got = op(x)
    assert got.shape == (num_tokens, 30)
    alone = form(Linear(weight, weight[:, 0]), CPU, dtype=torch.float32)
    for token in range(num_tokens):
        assert torch.equal(got[token : token + 1], alone(x[token : token + 1].clone()))
