"""Experts on several ranks, each a thread with groups of its own.

The oracle is one rank with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.device.cpu.isa import read_isa
from aserve.gpu.device.cpu.kernel_linear import QuantLinear
from aserve.gpu.device.cpu.linear import LinearPerExpert
from aserve.gpu.device.cpu.weights import choose_cpu_format
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.moe.dispatch import LocalDispatcher
from aserve.gpu.moe.layer import ExpertMlp, GatedExperts
from aserve.gpu.moe.routing import Routed
from aserve.gpu.moe.two_batches import expert_layers
from aserve.gpu.parallel.balancer import BalancedDispatcher, ExpertMoves
from aserve.gpu.parallel.collectives import ALONE, GroupCollectives
from aserve.gpu.parallel.exchange import GroupExchange, all_to_all_of
from aserve.gpu.parallel.experts import MAX_LOW_LATENCY_TOKENS, ExpertRanks, expert_ranks
from aserve.gpu.parallel.source import PlacedExperts, for_rank
from aserve.gpu.weights.format import WeightRequest
from aserve.gpu.weights.source import HOST, ExpertPart, Target
from aserve.parallel.topology import Coordinates, Patience
from aserve.tiny import MODEL_DIR
from tests.gpu.weights.mixtures import write_mixtures
from tests.gpu.weights.published import in_4_bits
from tests.gpu.weights.test_int4 import CONFIGS
from tests.load_model import load_model

T = TypeVar("T")

NUM_EXPERTS, HIDDEN = 8, 16
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [1],
}
COMPILING = Lock()
BACKENDS = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")


def on_ranks(num_ranks: int, store: Path, run: Callable[[Coordinates], T]) -> list[T]:
    """Runs all ranks at once."""
    with ThreadPoolExecutor(num_ranks) as threads:
        places = [Coordinates(rank, num_ranks, str(store)) for rank in range(num_ranks)]
        return list(threads.map(run, places))


def load(folder: Path, experts: ExpertRanks | None = None, **changes: Any) -> CausalModel:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    target = HOST
    if experts is not None:
        target = for_rank(HOST, experts.dense, beside={}, experts=experts.part)
    model = load_model(folder, load_format="dummy", dtype="float64", target=target)
    if experts is not None:
        experts.place_experts(model)
    return model


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_compute_what_one_with_all_experts_does(
    num_ranks: int, backend: str, tmp_path: Path
) -> None:
    """With fewer tokens than ranks, some ranks have none. The last batch is too large for the
    low-latency mode. All ranks have the same bits."""
    sizes = (1, 2, 13, num_ranks * MAX_LOW_LATENCY_TOKENS + 1)
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64, generator=generator) for n in sizes]
    [oracle] = expert_layers(load(tmp_path / "whole"))
    expected = [oracle(x) for x in xs]

    def run(place: Coordinates) -> list[Tensor]:
        ranks = GroupCollectives(place, Patience())
        part = ExpertPart(place.rank, num_ranks)
        experts = expert_ranks(place, ranks, part, backend=backend, is_divided=False)
        [mlp] = expert_layers(load(tmp_path / f"rank{place.rank}", experts))
        # Two forwards at once, as in two-batch overlap.
        first, second = mlp.start(xs[0]), mlp.start(xs[1])
        computed = mlp.compute(first), mlp.compute(second)
        return [*map(mlp.finish, computed), *map(mlp, xs[2:])]

    for got in zip(expected, *on_ranks(num_ranks, tmp_path / "store", run), strict=True):
        torch.testing.assert_close(got[1], got[0], atol=1e-12, rtol=1e-12)
        assert all(torch.equal(each, got[1]) for each in got[2:])


def test_ranks_keep_the_codes_of_their_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And compute what one with all experts does. NOTE: the kernels of two threads may not share
    numba's threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    own, _ = write_mixtures(tmp_path, in_4_bits("awq", 32), CONFIGS["awq"])
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    [oracle] = expert_layers(load_model(own, target=coded_target()))
    expected = oracle(x)

    def run(place: Coordinates) -> tuple[Tensor, int]:
        ranks = GroupCollectives(place, Patience())
        mlp = placed_layer(own, place, ranks, interval=None)
        return mlp(x), num_coded(mlp)

    for got, num_kept in on_ranks(2, tmp_path / "store", run):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert num_kept == 4


def test_experts_that_are_moved_have_no_codes(tmp_path: Path) -> None:
    own, _ = write_mixtures(tmp_path, in_4_bits("awq", 32), CONFIGS["awq"])

    def run(place: Coordinates) -> int:
        ranks = GroupCollectives(place, Patience())
        return num_coded(placed_layer(own, place, ranks, interval=9))

    assert on_ranks(2, tmp_path / "store", run) == [0, 0]


def coded_target() -> Target:
    request = WeightRequest("float32", None, 1, stored_quantization="int4")
    form = choose_cpu_format(request, read_isa())
    return Target(prepare=form.prepare, prepare_grouped=form.prepare_grouped)


def placed_layer(
    folder: Path, place: Coordinates, ranks: GroupCollectives, *, interval: int | None
) -> ExpertMlp:
    """Returns the only layer of a model of which this rank has some of the experts. NOTE: numba
    compiles a kernel for one thread at a time."""
    part = ExpertPart(place.rank, place.num_ranks)
    experts = expert_ranks(
        place, ranks, part, backend=BACKENDS[0], is_divided=False, interval=interval
    )
    target = for_rank(coded_target(), experts.dense, beside={}, experts=experts.part)
    with COMPILING:
        model = load_model(folder, target=target)
    experts.place_experts(model)
    [mlp] = expert_layers(model)
    return mlp


def num_coded(mlp: ExpertMlp) -> int:
    """Returns how many experts have codes in their first product."""
    assert isinstance(mlp.experts, GatedExperts)
    placed = mlp.experts.gate_up
    assert isinstance(placed, PlacedExperts)
    made = placed.part.experts if isinstance(placed.part, LinearPerExpert) else ()
    return sum(isinstance(each, QuantLinear) for each in made)


def test_padding_is_no_load() -> None:
    """Data-parallel ranks pad their tokens with zeros, which are routed like all others."""
    balancer = BalancedDispatcher(
        LocalDispatcher(4),
        range(4),
        num_experts=4,
        interval=9,
        moves=Mock(spec=ExpertMoves),
        device=torch.device("cpu"),
    )
    x = torch.zeros(5, HIDDEN)
    x[1], x[3, 2] = 1.0, -0.5
    sent = balancer.start(x, Routed(torch.tensor([[0, 1]] * 3 + [[1, 3]] * 2), torch.ones(5, 2)))
    arrived = sent.finish()
    arrived.combine(arrived.x).finish()
    assert balancer._loads.tolist() == [1, 2, 0, 1, 0]


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_experts_move_with_the_load_and_compute_the_same(backend: str, tmp_path: Path) -> None:
    """Four ranks have eight experts and four copies, and move them after every third forward. The
    tokens are alike, so a few experts get most of them."""
    generator = torch.Generator().manual_seed(7)
    center = torch.randn(HIDDEN, dtype=torch.float64, generator=generator)
    xs = [
        center * sign + 0.3 * torch.randn(30, HIDDEN, dtype=torch.float64, generator=generator)
        for sign in (1, 1, 1, -1, -1, -1, 1, 1)
    ]
    [oracle] = expert_layers(load(tmp_path / "whole"))
    expected = [oracle(x) for x in xs]

    def run(place: Coordinates) -> tuple[list[Tensor], list[tuple[int, ...]]]:
        ranks, part = GroupCollectives(place, Patience()), ExpertPart(place.rank, 4, 4)
        experts = expert_ranks(place, ranks, part, backend=backend, is_divided=False, interval=3)
        [mlp] = expert_layers(load(tmp_path / f"rank{place.rank}", experts))
        assert isinstance(mlp.dispatcher, BalancedDispatcher)
        found, slots = [], []
        for x in xs:
            found.append(mlp(x))
            slots.append(mlp.dispatcher.slots)
        return found, slots

    ranks = on_ranks(4, tmp_path / "store", run)
    for found, slots in ranks:
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
        assert slots == ranks[0][1]
        assert len(set(slots)) == 3


@pytest.mark.parametrize("is_fixed", [True, False])
def test_an_exchange_brings_each_rank_its_part(tmp_path: Path, *, is_fixed: bool) -> None:
    """Parts of several dtypes, some of them empty where shapes are not fixed."""

    def part(sender: int, receiver: int) -> tuple[Tensor, Tensor]:
        num_rows = 2 if is_fixed else sender * receiver
        numbers = torch.arange(num_rows * 3, dtype=torch.float64).view(num_rows, 3)
        return torch.full((num_rows,), sender, dtype=torch.int8), numbers + 10 * receiver

    def run(place: Coordinates) -> list[tuple[Tensor, ...]]:
        ranks = GroupCollectives(place, Patience())
        exchange = GroupExchange(all_to_all_of(place, ranks), ranks, has_fixed_shapes=is_fixed)
        posted = exchange.start([part(place.rank, other) for other in range(3)])
        return list(exchange.finish(posted))

    for rank, received in enumerate(on_ranks(3, tmp_path / "store", run)):
        for sender, got in enumerate(received):
            for tensor, expected in zip(got, part(sender, rank), strict=True):
                assert torch.equal(tensor, expected)
                assert tensor.dtype == expected.dtype


class Rank:
    """`Collectives` of a rank whose model is not run."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    def sum(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def concat(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def least(self, number: int) -> int:
        raise NotImplementedError


def placed(num_ranks: int, *, is_divided: bool) -> ExpertRanks:
    ranks = Rank(1, num_ranks)
    dense = ranks if is_divided else ALONE
    return ExpertRanks(ranks, dense, ExpertPart(1, num_ranks), BACKENDS[0], None, None)


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_rank_has_whole_experts_and_its_part_of_the_rest(
    tmp_path: Path, *, is_divided: bool
) -> None:
    model = load(tmp_path, placed(2, is_divided=is_divided))
    whole = load(tmp_path)
    assert isinstance(model, Decoder)
    assert isinstance(whole, Decoder)
    num_heads = [decoder.layers[0].num_heads for decoder in (whole, model)]
    assert num_heads == ([2, 1] if is_divided else [2, 2])


def test_experts_of_the_size_of_an_mlp_are_whole(tmp_path: Path) -> None:
    """Mixtral's have no size of their own."""
    changes = {"architectures": ["MixtralForCausalLM"], "num_local_experts": NUM_EXPERTS}
    experts = {"intermediate_size": 26, "moe_intermediate_size": None, "num_experts": None}
    load(tmp_path, placed(4, is_divided=False), **changes, **experts)
    with pytest.raises(ConfigError, match="num_attention_heads is 2"):
        load(tmp_path, placed(4, is_divided=True), **changes, **experts)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "complaint"),
    [
        ({"num_experts": 6}, 4, "6 experts and 0 copies cannot be divided among 4 ranks"),
        ({"mlp_only_layers": [0, 1]}, 2, "is for models with experts"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    tmp_path: Path, changes: dict[str, Any], num_ranks: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, placed(num_ranks, is_divided=False), **changes)
    small = json.loads((MODEL_DIR / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="is for models with experts"):
        load(tmp_path, placed(2, is_divided=False), **small)
