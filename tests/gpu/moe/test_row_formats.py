"""Rows that travel in eight bits, between the logical ranks of DeepEP's low-latency mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.layers.grouped_linear import linear_per_expert
from aserve.gpu.layers.linear import prepare
from aserve.gpu.moe.deepep import LowLatencyDispatcher
from aserve.gpu.moe.logical_ranks import LogicalRanks
from aserve.gpu.moe.routing import Routed, Routing, route
from aserve.gpu.moe.row_formats import CHANNELS, FP8_ROWS, PLAIN_ROWS, RowFormat

NUM_EXPERTS, HIDDEN, TOP_K = 4, 3 * CHANNELS, 2
SIZES = ((7,), (5, 0), (1, 4, 0, 6))  # tokens of each rank


def rows(num_tokens: int) -> Tensor:
    """Each group of channels has a size of its own, and some values are zeros or tiny."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    x *= torch.tensor([1e-3, 1.0, 300.0]).repeat_interleave(CHANNELS)
    x[:, ::9] *= 1e-4
    x[:, 5] = 0
    return x.bfloat16()


def there_and_back(x: Tensor) -> Tensor:
    return FP8_ROWS.decode(FP8_ROWS.encode(x), x.dtype)


def run(xs: list[Tensor], routed: list[Routed], row_format: RowFormat) -> tuple[list[Tensor], int]:
    """What each rank gets from experts that multiply, and the bytes that travelled to them."""
    ranks, num_own = LogicalRanks(len(xs)), NUM_EXPERTS // len(xs)
    weights = torch.randn(NUM_EXPERTS, 9, HIDDEN, generator=torch.Generator().manual_seed(1))
    dispatchers = [
        LowLatencyDispatcher(NUM_EXPERTS, exchange, max_tokens=8, row_format=row_format)
        for exchange in ranks.exchanges()
    ]
    sent = [each.start(x, r) for each, x, r in zip(dispatchers, xs, routed, strict=True)]
    num_bytes = ranks.num_bytes
    combining = []
    for rank, each in enumerate(sent):
        arrived = each.finish()
        own = weights.bfloat16()[rank * num_own : (rank + 1) * num_own]
        assert arrived.x.dtype == torch.bfloat16
        layer = linear_per_expert(own, None, prepare)
        combining.append(arrived.combine(layer(arrived.x, arrived.groups)))
    return [each.finish() for each in combining], num_bytes


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_in_eight_bits_give_the_sums_of_rounded_rows(sizes: tuple[int, ...]) -> None:
    """The result is that of bfloat16 for rows that were rounded before, bit by bit; half of the
    bytes travel, and the scales."""
    xs = [rows(size) for size in sizes]
    generator = torch.Generator().manual_seed(2)
    routed = [
        route(torch.randn(len(x), NUM_EXPERTS, generator=generator), None, Routing(TOP_K))
        for x in xs
    ]
    got, num_bytes = run(xs, routed, FP8_ROWS)
    expected, plain_bytes = run([there_and_back(x) for x in xs], routed, PLAIN_ROWS)
    for own, other in zip(got, expected, strict=True):
        assert torch.equal(own, other)
    assert 0.5 < num_bytes / plain_bytes < 0.53


def test_the_error_of_a_row_is_within_the_bound_of_three_bits() -> None:
    """A group's scale is its own, so that small channels keep their precision beside large ones."""
    x = rows(50)
    groups = x.double().view(50, 3, CHANNELS)
    scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-4) / 448
    values, sent_scales = FP8_ROWS.encode(x)
    assert values.nbytes + sent_scales.nbytes == x.numel() + 50 * 3 * 4
    exact = FP8_ROWS.decode((values, sent_scales), torch.float32).double().view(groups.shape)
    bound = torch.maximum(groups.abs() / 16, scales / 1024) * (1 + 1e-5)
    assert bool(((exact - groups).abs() <= bound).all())
    assert not FP8_ROWS.decode(FP8_ROWS.encode(torch.zeros(2, HIDDEN)), torch.float32).any()


def test_rows_without_whole_groups_are_refused() -> None:
    with pytest.raises(BugError, match="rows of 100 in eight bits"):
        FP8_ROWS.encode(torch.zeros(1, 100))
