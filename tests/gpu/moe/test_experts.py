"""A mixture of experts equals a dense loop over its experts, whatever dispatcher moves the rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.layers.grouped_linear import Groups, linear_per_expert
from aserve.gpu.layers.linear import Linear, prepare
from aserve.gpu.layers.mlp import GatedActivation
from aserve.gpu.moe.deepep import LowLatencyDispatcher, NormalDispatcher
from aserve.gpu.moe.dispatch import Dispatcher, LocalDispatcher
from aserve.gpu.moe.layer import ExpertMlp, ExpertsSpec, GatedExperts
from aserve.gpu.moe.logical_ranks import LogicalExchange, LogicalRanks
from aserve.gpu.moe.routing import ExpertGroups, Routed, Routing, Scores, route

NUM_EXPERTS, HIDDEN, SIZE, TOP_K, LIMIT = 8, 6, 10, 3, 16
GATED = GatedActivation("silu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


class Weights:
    def __init__(self) -> None:
        self.gate_up = torch.randn(NUM_EXPERTS, 2 * SIZE, HIDDEN, dtype=torch.float64)
        self.down = torch.randn(NUM_EXPERTS, HIDDEN, SIZE, dtype=torch.float64)

    def dense(self, x: Tensor, routed: Routed) -> Tensor:
        """The oracle: every expert computes every token."""
        y = torch.zeros_like(x)
        for e, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            weight = torch.where(routed.experts == e, routed.weights, 0.0).sum(1, keepdim=True)
            y += weight * (GATED(x @ gate_up.T) @ down.T)
        return y

    def part(self, rank: int, num_ranks: int) -> GatedExperts:
        own = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
        gate_up, down = (
            linear_per_expert(weights[own], None, prepare) for weights in (self.gate_up, self.down)
        )
        return GatedExperts(gate_up, down, GATED)


Make = Callable[[LogicalExchange], Dispatcher]
MODES: dict[str, Make] = {
    "normal": lambda exchange: NormalDispatcher(NUM_EXPERTS, exchange),
    "low-latency": lambda exchange: LowLatencyDispatcher(NUM_EXPERTS, exchange, max_tokens=LIMIT),
}


def run(weights: Weights, make: Make, xs: list[Tensor], routed: list[Routed]) -> list[Tensor]:
    """All ranks take each of the four halves before one takes the next."""
    ranks = [make(exchange) for exchange in LogicalRanks(len(xs)).exchanges()]
    sent = [rank.start(x, r) for rank, x, r in zip(ranks, xs, routed, strict=True)]
    arrived = [each.finish() for each in sent]
    experts = [weights.part(rank, len(xs)) for rank in range(len(xs))]
    ys = [e(a.x, a.groups) for e, a in zip(experts, arrived, strict=True)]
    combining = [a.combine(y) for a, y in zip(arrived, ys, strict=True)]
    return [each.finish() for each in combining]


def routed_of(x: Tensor, logits: Tensor) -> Routed:
    return route(logits.expand(len(x), NUM_EXPERTS), None, Routing(TOP_K, is_normalised=True))


IDENTITIES = 3


RANKS = [(11,), (5, 0), (3, 0, 1, 7)]


@pytest.mark.parametrize(("mode", "sizes"), [("local", (11,)), *product(MODES, RANKS)])
@pytest.mark.parametrize("pull", [0.0, 50.0])
def test_identity_experts_return_their_tokens_and_cost_no_dispatch(
    mode: str, sizes: tuple[int, ...], pull: float
) -> None:
    """With a strong pull all tokens choose identities alone, and no row travels."""
    weights, ranks = Weights(), LogicalRanks(len(sizes))
    make: Make = MODES.get(mode, lambda _: LocalDispatcher(NUM_EXPERTS))
    router = torch.randn(NUM_EXPERTS + IDENTITIES, HIDDEN, dtype=torch.float64)
    bias = torch.randn(NUM_EXPERTS + IDENTITIES, dtype=torch.float64)
    bias[NUM_EXPERTS:] += pull
    routing = Routing(TOP_K, factor=1.5)
    layers = [
        ExpertMlp(
            ExpertsSpec(
                NUM_EXPERTS,
                SIZE,
                routing,
                num_identity=IDENTITIES,
            ),
            router=Linear(router),
            bias=bias,
            experts=undefined_outside(weights.part(rank, len(sizes))),
            shared=None,
        )
        for rank in range(len(sizes))
    ]
    for layer, exchange in zip(layers, ranks.exchanges(), strict=True):
        layer.dispatcher = make(exchange)
    xs = [torch.randn(size, HIDDEN, dtype=torch.float64) for size in sizes]
    started = [layer.start(x) for layer, x in zip(layers, xs, strict=True)]
    num_sent = ranks.num_bytes
    computed = [layer.compute(each) for layer, each in zip(layers, started, strict=True)]
    for layer, x, each in zip(layers, xs, computed, strict=True):
        routed = route(x @ router.T, bias, routing)
        is_identity = routed.experts >= NUM_EXPERTS
        assert is_identity.any() or not len(x)
        own = torch.where(is_identity, routed.weights, 0.0).sum(1, keepdim=True)
        torch.testing.assert_close(layer.finish(each), weights.dense(x, routed) + own * x)
    if pull and mode == "normal":
        assert num_sent == 0


def undefined_outside(experts: GatedExperts) -> Callable[[Tensor, Groups], Tensor]:
    """Rows outside of the groups become NaN, as what a kernel leaves there may be."""

    def run(x: Tensor, groups: Groups) -> Tensor:
        rows = torch.arange(len(x))[:, None]
        is_own = ((rows >= groups.starts) & (rows < groups.ends)).any(dim=1, keepdim=True)
        return torch.where(is_own, experts(x, groups), torch.nan)

    return run


ONE_EXPERT_FIRST = torch.tensor([9.0, 5.0, 4.0, *[0.0] * (NUM_EXPERTS - 3)], dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(11,), (5, 9), (0, 16), (3, 0, 1, 7), (0, 0, 0, 0)])
@pytest.mark.parametrize("is_skewed", [False, True])
def test_ranks_together_compute_what_a_dense_loop_does(
    mode: str, sizes: tuple[int, ...], *, is_skewed: bool
) -> None:
    """Some ranks have no tokens; a skewed routing sends all tokens to the same experts."""
    weights = Weights()
    xs = [torch.randn(size, HIDDEN, dtype=torch.float64) for size in sizes]
    logits = [
        ONE_EXPERT_FIRST if is_skewed else torch.randn(len(x), NUM_EXPERTS, dtype=torch.float64)
        for x in xs
    ]
    routed = [routed_of(x, own) for x, own in zip(xs, logits, strict=True)]
    for x, own, y in zip(xs, routed, run(weights, MODES[mode], xs, routed), strict=True):
        torch.testing.assert_close(y, weights.dense(x, own), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_one_rank_with_all_experts_sorts_rows(num_tokens: int) -> None:
    weights, local = Weights(), LocalDispatcher(NUM_EXPERTS)
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.float64)
    routed = routed_of(x, torch.randn(num_tokens, NUM_EXPERTS, dtype=torch.float64))
    arrived = local.start(x, routed).finish()
    counts = arrived.groups.ends - arrived.groups.starts
    assert counts.sum() == num_tokens * TOP_K
    y = weights.part(0, 1)(arrived.x, arrived.groups)
    torch.testing.assert_close(
        arrived.combine(y).finish(), weights.dense(x, routed), atol=1e-12, rtol=1e-12
    )


def test_a_tokens_sum_has_the_same_bits_alone_and_in_a_batch() -> None:
    local = LocalDispatcher(NUM_EXPERTS)
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    routed = routed_of(x, torch.randn(9, NUM_EXPERTS, dtype=torch.float64))

    def of(x: Tensor, routed: Routed) -> Tensor:
        arrived = local.start(x, routed).finish()
        y = (arrived.x * 3.0).sin()  # stands for experts without rounding of their own
        return arrived.combine(y).finish()

    alone = [of(x[t : t + 1], Routed(*(part[t : t + 1] for part in routed))) for t in range(9)]
    assert torch.equal(of(x, routed), torch.cat(alone))


def test_b28_more_tokens_than_the_low_latency_limit_are_refused() -> None:
    (exchange,) = LogicalRanks(1).exchanges()
    x = torch.randn(LIMIT + 1, HIDDEN, dtype=torch.float64)
    with pytest.raises(BugError, match=f"{LIMIT + 1} tokens .* at most {LIMIT} per rank"):
        MODES["low-latency"](exchange).start(x, routed_of(x, ONE_EXPERT_FIRST))


def test_b28_a_rank_that_stays_away_is_noticed() -> None:
    first, _ = LogicalRanks(2).exchanges()
    dispatcher = MODES["normal"](first)
    x = torch.randn(2, HIDDEN, dtype=torch.float64)
    sent = dispatcher.start(x, routed_of(x, ONE_EXPERT_FIRST))
    with pytest.raises(BugError, match=r"rank 0 would wait for ranks \[1\]"):
        sent.finish()


def test_low_latency_rows_are_packed_behind_fixed_bounds() -> None:
    """The layout is [local experts, ranks * limit, hidden], an expert's filled rows first."""
    xs = [torch.randn(size, HIDDEN, dtype=torch.float64) for size in (4, 2)]
    ranks = [MODES["low-latency"](exchange) for exchange in LogicalRanks(2).exchanges()]
    sent = [r.start(x, routed_of(x, ONE_EXPERT_FIRST)) for r, x in zip(ranks, xs, strict=True)]
    arrived = sent[0].finish()
    assert arrived.x.shape == (NUM_EXPERTS // 2 * 2 * LIMIT, HIDDEN)
    starts = torch.arange(NUM_EXPERTS // 2) * 2 * LIMIT
    assert torch.equal(arrived.groups.starts, starts.int())
    assert torch.equal(
        arrived.groups.ends - arrived.groups.starts, torch.tensor([6, 6, 6, 0]).int()
    )
    assert torch.equal(arrived.x[:6], torch.cat(xs))


GROUPS = ExpertGroups(4, num_kept=1, num_summed=2)


def test_groups_are_chosen_by_their_best_experts() -> None:
    """Experts 0 and 1 have the two best scores of one group, expert 6 the best of all."""
    scores = torch.tensor([[0.8, 0.7, 0.1, 0.1, 0.1, 0.1, 0.9, 0.1]], dtype=torch.float64)
    by_two = Routing(2, scores=Scores.SIGMOID, groups=GROUPS)
    assert set(route(scores.logit(), None, by_two).experts[0].numpy()) == {0, 1}
    by_one = Routing(2, scores=Scores.SIGMOID, groups=ExpertGroups(4, num_kept=1, num_summed=1))
    assert set(route(scores.logit(), None, by_one).experts[0].numpy()) == {6, 7}


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    scores = torch.tensor([[0.8, 0.7, 0.2, 0.1]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0])
    routing = Routing(2, scores=Scores.SIGMOID, is_normalised=True, factor=2.5)
    routed = route(scores.logit(), bias, routing)
    assert routed.experts[0].numpy().tolist() == [2, 0]
    torch.testing.assert_close(routed.weights, torch.tensor([[0.5, 2.0]], dtype=torch.float64))


def test_weights_of_logits_are_a_softmax_over_the_chosen_experts() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    routed = route(logits, None, Routing(2, scores=Scores.LOGITS))
    assert torch.equal(routed.weights, torch.tensor([[3.0, 2.0]]).softmax(1))


def test_rows_outside_of_the_groups_are_left_alone() -> None:
    layer = linear_per_expert(torch.ones(2, 1, 4), torch.tensor([[0.0], [1.0]]), prepare)
    starts, ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([1, 5], dtype=torch.int32)
    y = layer(torch.ones(6, 4), Groups(starts, ends))
    assert torch.equal(y[[0, 3, 4]], torch.tensor([[4.0], [5.0], [5.0]]))
