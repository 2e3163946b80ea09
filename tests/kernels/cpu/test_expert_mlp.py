"""The routing of the compiled mixture of experts against that of the layers in torch. The layers
themselves are compared in tests/parity/test_compiled_experts.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from aserve.gpu.device.cpu.expert_records import SCORES
from aserve.gpu.moe.routing import ExpertGroups, Routed, Routing, Scores, route
from aserve_kernels.cpu.bf16 import Float32s
from aserve_kernels.cpu.decoder_layers import Records
from aserve_kernels.cpu.expert_mlp import MIXTURE, route_token
from aserve_kernels.cpu.step_function import Int32s

ROUTINGS = {
    "softmax": Routing(3),
    "all experts": Routing(12),
    "normalised": Routing(3, is_normalised=True),
    "factor": Routing(2, is_normalised=True, factor=2.5),
    "sigmoid": Routing(4, scores=Scores.SIGMOID, is_normalised=True),
    "logits": Routing(3, scores=Scores.LOGITS),
    "best groups": Routing(3, groups=ExpertGroups(4, num_kept=2, num_summed=1)),
    "sums of groups": Routing(3, scores=Scores.SIGMOID, groups=ExpertGroups(3, 1, num_summed=2)),
}
NUM_EXPERTS = 12


@njit(nogil=True)
def _route_all(
    layers: Records, scores: Float32s, bias: Float32s, experts: Int32s, weights: Float32s
) -> None:
    choice = np.empty(scores.shape[1], np.float32)
    for token in range(scores.shape[0]):
        own = (experts[token], weights[token])
        route_token(layers[0], scores[token], bias, choice, *own)


def routed(logits: Tensor, bias: Tensor | None, routing: Routing) -> Routed:
    record = np.zeros(1, MIXTURE)
    groups = routing.groups or ExpertGroups(0, 0, 0)
    record["count"], record["scores"] = logits.shape[1], SCORES[routing.scores]
    record["is_normalised"], record["factor"] = routing.is_normalised, routing.factor
    record["groups"], record["kept_groups"] = groups.count, groups.num_kept
    record["summed_scores"] = groups.num_summed
    shape = (len(logits), routing.top_k)
    experts, weights = np.full(shape, -1, np.int32), np.empty(shape, np.float32)
    own_bias = np.empty(0, np.float32) if bias is None else bias.numpy()
    _route_all(record, logits.clone().numpy(), own_bias, experts, weights)
    return Routed(torch.from_numpy(experts).long(), torch.from_numpy(weights))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_tokens_go_to_the_experts_of_the_router_in_torch(name: str, has_bias: bool) -> None:
    logits, bias = drawn(1, 40, NUM_EXPERTS) * 3, drawn(2, NUM_EXPERTS) if has_bias else None
    own, expected = (each(logits, bias, ROUTINGS[name]) for each in (routed, route))
    assert torch.equal(own.experts, expected.experts)
    torch.testing.assert_close(own.weights, expected.weights)


def test_of_experts_that_score_alike_the_first_ones_are_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    assert routed(logits, None, Routing(4)).experts.tolist() == [[1, 3, 2, 4]]


@pytest.mark.parametrize("name", ROUTINGS)
def test_logits_that_are_no_numbers_choose_experts_that_exist(name: str) -> None:
    """Their numbers are addresses of products."""
    logits = drawn(1, 3, NUM_EXPERTS)
    logits[0], logits[1, 4], logits[2, 5] = torch.nan, torch.nan, torch.inf
    own = routed(logits, None, ROUTINGS[name])
    for experts in own.experts.tolist():
        assert len({*experts}) == len(experts)
        assert {*experts} <= {*range(NUM_EXPERTS)}
    assert bool(own.weights[0].isnan().all())
