"""Experts on ranks of simulated CUDA: rows and weights travel as work of the devices, and captured
graphs read experts that have moved since. Each rank is a thread with a device of its own; the
oracle is one rank with all experts.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.layers.grouped_linear import linear_per_expert
from aserve.gpu.layers.linear import Linear, prepare
from aserve.gpu.models.base import CausalModel
from aserve.gpu.moe.layer import ExpertMlp, ExpertsSpec, GatedExperts
from aserve.gpu.moe.routing import Routing
from aserve.gpu.parallel import experts as expert_ranks
from aserve.gpu.parallel.collectives import ALONE, GroupCollectives, gloo_group
from aserve.gpu.parallel.device_collectives import DeviceCollectives, DeviceGroup
from aserve.gpu.parallel.exchange import all_to_all_of
from aserve.gpu.parallel.experts import MAX_LOW_LATENCY_TOKENS, ExpertRanks
from aserve.gpu.parallel.source import PlacedExperts
from aserve.gpu.weights.source import ExpertPart
from aserve.parallel.topology import Coordinates, Patience
from tests.fakes.cuda import FakeCuda
from tests.fakes.hash_model import HashModel
from tests.fakes.nccl import FakeNccl, Links, joined_on
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.parallel.test_expert_ranks import BACKENDS, on_ranks

NUM_EXPERTS, HIDDEN, INNER, TOKENS = 4, 6, 3, 5
SPEC = ExpertsSpec(NUM_EXPERTS, INNER, Routing(top_k=2))
INTERVAL = 3


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def mlp_on(device: torch.device, held: tuple[int, ...]) -> ExpertMlp:
    """The layer of a rank that has these experts."""

    def placed(stack: Tensor) -> PlacedExperts:
        own = stack[list(held)].to(device)
        return PlacedExperts(own, lambda weights: linear_per_expert(weights, None, prepare))

    gate_up = drawn(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=1)
    down = drawn(NUM_EXPERTS, HIDDEN, INNER, seed=2)
    return ExpertMlp(
        SPEC,
        router=Linear(drawn(NUM_EXPERTS, HIDDEN, seed=3).to(device)),
        bias=None,
        experts=GatedExperts(placed(gate_up), placed(down), gated),
        shared=None,
    )


def model_of(mlp: ExpertMlp) -> CausalModel:
    return Mock(spec=CausalModel, mlps=(mlp,), hidden_size=HIDDEN, dtype=torch.float64)


class Rank:
    def __init__(self, place: Coordinates, links: Links, backend: str) -> None:
        self.cuda = FakeCuda()
        part = ExpertPart(place.rank, place.num_ranks, num_redundant=2)
        with self.cuda:
            self.device = CudaDevice(self.cuda)
            ranks = joined_on(
                self.device, FakeNccl(self.cuda, links, place.rank), place, Patience()
            )
            self.mlp = mlp_on(self.cuda.torch_device, part.held(NUM_EXPERTS))
            self.experts = ExpertRanks(ranks, ALONE, part, backend, INTERVAL, ranks.group)
            self.experts.place_experts(model_of(self.mlp))

    @property
    def slots(self) -> tuple[int, ...]:
        [dispatcher] = self.experts.balanced_dispatchers
        return dispatcher.slots

    def copied(self, x: Tensor) -> Tensor:
        return x.to(self.cuda.torch_device)


# The tokens of a step are alike, so a few experts get most of them.
XS = [drawn(1, HIDDEN, seed=13 + n // 3) + 0.1 * drawn(TOKENS, HIDDEN, seed=n) for n in range(9)]


@pytest.fixture(autouse=True)
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_ranks, "expert_layers", lambda model: model.mlps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_on_devices_compute_what_one_with_all_experts_does(
    backend: str, tmp_path: Path
) -> None:
    """On the CPU, over a group of gloo, which stands for that of the devices. In the normal mode,
    and where experts move, each wait for the device is watched."""
    oracle = mlp_on(torch.device("cpu"), tuple(range(NUM_EXPERTS)))

    def run(place: Coordinates) -> tuple[list[Tensor], int]:
        group = cast(DeviceGroup, gloo_group(place, name="device"))
        ranks = DeviceCollectives(GroupCollectives(place, Patience()), group)
        ranks.waiting = Mock(side_effect=contextlib.nullcontext)
        part = ExpertPart(place.rank, 2, num_redundant=2)
        mlp = mlp_on(torch.device("cpu"), part.held(NUM_EXPERTS))
        experts = ExpertRanks(ranks, ALONE, part, backend, INTERVAL, all_to_all_of(place, ranks))
        experts.place_experts(model_of(mlp))
        found = [mlp(x) for x in XS]
        assert experts.balanced_dispatchers[0].slots != part_slots
        return found, ranks.waiting.call_count

    part_slots = tuple(slot % NUM_EXPERTS for slot in range(NUM_EXPERTS + 2))
    num_moves = (len(XS) - 1) // INTERVAL
    num_waits = num_moves + (2 * len(XS) if backend == BACKENDS[1] else 0)
    for found, waits in on_ranks(2, tmp_path / "store", run):
        torch.testing.assert_close(found, [oracle(x) for x in XS], atol=1e-12, rtol=1e-12)
        assert waits == num_waits


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
def test_experts_move_between_devices_and_compute_the_same(backend: str, tmp_path: Path) -> None:
    links, oracle = Links(2), mlp_on(torch.device("cpu"), tuple(range(NUM_EXPERTS)))

    def run(place: Coordinates) -> tuple[list[Tensor], list[tuple[int, ...]]]:
        rank = Rank(place, links, backend)
        found, slots = [], []
        with rank.device.stream():
            for x in XS:
                found.append(rank.mlp(rank.copied(x)))
                slots.append(rank.slots)
        found = [rank.cuda.read(each) for each in found]
        rank.cuda.assert_sound()
        return found, slots

    for found, slots in on_ranks(2, tmp_path / "store", run):
        torch.testing.assert_close(found, [oracle(x) for x in XS], atol=1e-12, rtol=1e-12)
        assert len(set(slots)) > 1


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
def test_a_captured_graph_counts_tokens_and_reads_experts_that_have_moved(
    backend: str, tmp_path: Path
) -> None:
    links, oracle = Links(2), mlp_on(torch.device("cpu"), tuple(range(NUM_EXPERTS)))

    def run(place: Coordinates) -> tuple[list[Tensor], list[tuple[int, ...]]]:
        rank = Rank(place, links, backend)
        found, slots = [], []
        with rank.device.stream():
            buffer = rank.copied(XS[0])
            with rank.experts.capturing():
                captured = rank.device.capture(lambda _break: rank.mlp(buffer))
            for x in XS:
                buffer.copy_(rank.copied(x))
                rank.experts.before_replay()
                found.append(captured.replay(lambda _values: None).clone())
                slots.append(rank.slots)
        found = [rank.cuda.read(each) for each in found]
        rank.cuda.assert_sound()
        return found, slots

    for found, slots in on_ranks(2, tmp_path / "store", run):
        torch.testing.assert_close(found, [oracle(x) for x in XS], atol=1e-12, rtol=1e-12)
        assert slots[:INTERVAL] == slots[:1] * INTERVAL
        assert len(set(slots)) > 1


@pytest.mark.parametrize(
    ("backend", "most"), [*zip(BACKENDS, (4000, 0, 2 * MAX_LOW_LATENCY_TOKENS), strict=True)]
)
def test_forwards_whose_host_waits_for_the_routing_are_not_captured(
    backend: str, most: int, tmp_path: Path
) -> None:
    def run(place: Coordinates) -> int:
        return Rank(place, links, backend).experts.graph_tokens(4000)

    links = Links(2)
    assert on_ranks(2, tmp_path / "store", run) == [most] * 2


def test_the_graphs_of_steps_tell_of_captures_and_replays() -> None:
    experts = Mock(spec=ExpertRanks, graph_tokens=lambda most: most)
    experts.capturing = Mock(side_effect=contextlib.nullcontext)
    none = Mock(spec=ExpertRanks, graph_tokens=lambda _most: 0)
    with FakeCuda() as cuda:
        model, device = HashModel(device=cuda.torch_device), CudaDevice(cuda)
        make = functools.partial(make_executor, model, device=device, attention="torch-ref")
        assert "no graphs" in make(experts=none).about
        executor = make(experts=experts, graph_rows=1)
    captured(executor)
    serve(executor, [request("r", [1, 2, 3])])
    assert experts.capturing.call_count == len(executor._graphs._graphs) > 0
    assert experts.before_replay.call_count == cuda.num_replays > 0
