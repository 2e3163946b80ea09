"""What a test makes under `OnDevice` is there, whatever it says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.on_device import OnDevice

META = torch.device("meta")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, generator=torch.Generator().manual_seed(1)),
        lambda: torch.randperm(3, generator=torch.Generator().manual_seed(1)),
        lambda: torch.zeros(3, device=torch.device("cpu")),
        lambda: torch.tensor([1, 2, 3]),
        lambda: torch.from_numpy(np.ones(3)).to("cpu"),
        lambda: torch.ones(3).to(torch.bfloat16),
        lambda: torch.ones(3) * 2 + 1,
        lambda: torch.empty_like(torch.ones(3)),
    ],
)
def test_it_is_on_the_device(make: Callable[[], Tensor]) -> None:
    with OnDevice(META):
        assert make().device == META
    assert make().device.type == "cpu"


def test_its_numbers_are_those_of_the_cpu() -> None:
    expected = torch.randn(5, generator=torch.Generator().manual_seed(1))
    with OnDevice(torch.device("cpu")):
        assert torch.equal(torch.randn(5, generator=torch.Generator().manual_seed(1)), expected)
