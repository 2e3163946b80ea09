"""Ranks whose rows travel by the library deep_ep, for which a stand-in has its place, against one
rank with all experts. Ranks are threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.grouped_linear import linear_per_expert
from aserve.gpu.layers.linear import Linear, prepare
from aserve.gpu.models.base import CausalModel
from aserve.gpu.moe.layer import ExpertMlp, ExpertsSpec, GatedExperts
from aserve.gpu.moe.routing import Routing
from aserve.gpu.parallel import deepep_kernels
from aserve.gpu.parallel import experts as expert_ranks
from aserve.gpu.parallel.collectives import ALONE, GroupCollectives, gloo_group
from aserve.gpu.parallel.device_collectives import DeviceCollectives, DeviceGroup
from aserve.gpu.parallel.experts import MAX_LOW_LATENCY_TOKENS, ExpertRanks
from aserve.gpu.parallel.source import PlacedExperts
from aserve.gpu.weights.source import ExpertPart
from aserve.parallel.topology import Coordinates, Patience
from tests.fakes.deep_ep import Library
from tests.gpu.parallel.test_expert_ranks import BACKENDS, on_ranks

NUM_EXPERTS, NUM_IDENTITY, HIDDEN, INNER = 8, 2, 16, 12
SPEC = ExpertsSpec(NUM_EXPERTS, INNER, Routing(top_k=3), num_identity=NUM_IDENTITY)
NORMAL, LOW_LATENCY = BACKENDS[1:]
INTERVAL = 2


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def mlp_with(held: tuple[int, ...], dtype: torch.dtype) -> ExpertMlp:
    """The layer of a rank that has these experts."""

    def placed(stack: Tensor) -> PlacedExperts:
        return PlacedExperts(
            stack[list(held)].to(dtype), lambda own: linear_per_expert(own, None, prepare)
        )

    return ExpertMlp(
        SPEC,
        router=Linear(drawn(SPEC.num_choices, HIDDEN, seed=3).to(dtype)),
        bias=None,
        experts=GatedExperts(
            placed(drawn(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=1)),
            placed(drawn(NUM_EXPERTS, HIDDEN, INNER, seed=2)),
            gated,
        ),
        shared=None,
    )


def whole(dtype: torch.dtype = torch.bfloat16) -> ExpertMlp:
    return mlp_with(tuple(range(NUM_EXPERTS)), dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Sums in another order differ by rounding to bfloat16."""
    most = expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=0.02 * most, rtol=0.0)


Install = Callable[[Library], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.setattr(expert_ranks, "expert_layers", lambda model: model.mlps)

    def install(library: Library) -> None:
        monkeypatch.setattr(deepep_kernels, "find_spec", lambda _: object())
        monkeypatch.setitem(sys.modules, "deep_ep", library)

    return install


def placed_on(
    place: Coordinates,
    backend: str,
    *,
    interval: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[ExpertRanks, ExpertMlp]:
    group = cast(DeviceGroup, gloo_group(place, name="device"))
    ranks = DeviceCollectives(GroupCollectives(place, Patience()), group)
    part = ExpertPart(place.rank, place.num_ranks, num_redundant=4 if interval else 0)
    mlp = mlp_with(part.held(NUM_EXPERTS), dtype)
    experts = ExpertRanks(ranks, ALONE, part, backend, interval, group)
    model = Mock(spec=CausalModel, mlps=(mlp,), hidden_size=HIDDEN, dtype=dtype)
    experts.place_experts(model)
    return experts, mlp


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("backend", [NORMAL, LOW_LATENCY])
def test_ranks_compute_what_one_with_all_experts_does(
    num_ranks: int, backend: str, tmp_path: Path, install: Install
) -> None:
    """Two forwards are open at once, as in two-batch overlap. With fewer tokens than ranks some of
    them have none. The large batch takes the normal mode, so a low-latency one follows it, and
    again in a forward that would be a graph's."""
    large = num_ranks * MAX_LOW_LATENCY_TOKENS + 1
    sizes = (1, 2, 13, large, 9, large)
    xs = [drawn(n, HIDDEN, seed=7 + n) for n in sizes]
    expected = [whole()(x) for x in xs]
    library = Library(num_ranks)
    install(library)

    def run(place: Coordinates) -> list[Tensor]:
        experts, mlp = placed_on(place, backend)
        assert len(experts.kernels) == 1
        started = mlp.start(xs[0]), mlp.start(xs[1])
        computed = [mlp.compute(each) for each in started]
        found = [*map(mlp.finish, computed), *map(mlp, xs[2:])]
        experts.before_replay()
        return found

    for got in zip(expected, *on_ranks(num_ranks, tmp_path / "store", run), strict=True):
        assert_near(got[1], got[0])
        assert all(torch.equal(each, got[1]) for each in got[2:])
    is_low = backend == LOW_LATENCY
    tried = 1  # of the modes, at the start
    assert library.meeting.called["dispatch"] == num_ranks * (tried + (2 if is_low else len(xs)))
    assert (
        library.meeting.called["low-latency dispatch"] == num_ranks * (tried + len(xs) - 2) * is_low
    )
    assert library.meeting.called["clean"] == num_ranks * 3 * is_low


def test_tokens_that_only_choose_identities_travel_nowhere(
    tmp_path: Path, install: Install
) -> None:
    library = Library(2)
    install(library)
    x = drawn(6, HIDDEN, seed=5)

    def run(place: Coordinates) -> list[Tensor]:
        _, mlp = placed_on(place, LOW_LATENCY)
        mlp.bias = torch.zeros(SPEC.num_choices)
        mlp.bias[:NUM_EXPERTS] = -100.0
        return [mlp(x), mlp(x.repeat(100, 1))[:6]]

    alone = whole()
    alone.bias = torch.zeros(SPEC.num_choices)
    alone.bias[:NUM_EXPERTS] = -100.0
    for found in on_ranks(2, tmp_path / "store", run):
        for each in found:
            assert_near(each, alone(x))


def test_experts_that_move_are_reached_where_they_are(tmp_path: Path, install: Install) -> None:
    install(Library(2))
    xs = [
        drawn(1, HIDDEN, seed=13 + n // 3) + 0.1 * drawn(6, HIDDEN, seed=40 + n) for n in range(7)
    ]

    def run(place: Coordinates) -> tuple[list[Tensor], set[tuple[int, ...]]]:
        experts, mlp = placed_on(place, LOW_LATENCY, interval=INTERVAL)
        found, slots = [], set()
        for x in xs:
            found.append(mlp(x))
            slots.add(experts.balanced_dispatchers[0].slots)
        return found, slots

    for found, slots in on_ranks(2, tmp_path / "store", run):
        assert len(slots) > 1
        for x, y in zip(xs, found, strict=True):
            assert_near(y, whole()(x))


@pytest.mark.parametrize(
    ("library", "dtype"),
    [
        (Library(2, factor=1.5), torch.bfloat16),
        (Library(2, refuses=(1,)), torch.bfloat16),
        (Library(2), torch.float32),
    ],
    ids=["wrong sums", "refused by one rank", "another dtype"],
)
def test_all_ranks_leave_out_a_library_that_one_cannot_use(
    library: Library, dtype: torch.dtype, tmp_path: Path, install: Install
) -> None:
    install(library)
    x = drawn(5, HIDDEN, seed=2)
    expected = whole(dtype)(x.to(dtype))

    def run(place: Coordinates) -> Tensor:
        experts, mlp = placed_on(place, NORMAL, dtype=dtype)
        assert experts.kernels == []
        return mlp(x.to(dtype))

    for found in on_ranks(2, tmp_path / "store", run):
        assert_near(found, expected)


def test_a_number_of_ranks_that_the_library_does_not_know_is_left_to_nccl(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(Library(3))

    def run(place: Coordinates) -> DeviceCollectives:
        group = cast(DeviceGroup, gloo_group(place, name="device"))
        ranks = DeviceCollectives(GroupCollectives(place, Patience()), group)
        layout = deepep_kernels.ExpertLayout(6, HIDDEN, torch.bfloat16, 0)
        assert deepep_kernels.deepep_kernels(ranks, layout, torch.device("cpu")) is None
        return ranks

    on_ranks(3, tmp_path / "store", run)
    assert "Unsupported number of EP ranks: 3" in caplog.text
