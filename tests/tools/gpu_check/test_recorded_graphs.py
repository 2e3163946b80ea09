"""The stand-in for captured graphs refuses what a real capture refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tools.gpu_check.recorded_graphs import RecordingCpu

MASK = torch.tensor([True, False])


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[MASK],
        lambda x: x.index_put_((MASK,), x[:1]),
        lambda x: x.masked_select(MASK),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_body_that_asks_for_a_value_cannot_be_captured(ask: Callable[[Tensor], object]) -> None:
    x = torch.ones(2)

    def body(graph_break: Callable[[Tensor], None]) -> Tensor:
        ask(x)
        return x

    with pytest.raises(RuntimeError, match="cannot be captured"):
        RecordingCpu().capture(body)
