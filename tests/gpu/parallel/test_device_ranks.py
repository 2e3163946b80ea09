"""Ranks on simulated CUDA: steps whose collectives are work of the device, with graphs and without.

Each rank is a thread with a device of its own. A collective that one rank enters at another place
than the others does not end, and is noticed.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError, EngineDead
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.registry import devices_of, open_device
from aserve.gpu.models.base import Attend
from aserve.gpu.parallel import rank_watch
from aserve.gpu.parallel.collectives import Collectives
from aserve.gpu.parallel.rank_watch import RankWatch
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.topology import Coordinates, Patience, RankLost
from tests.fakes.cuda import FakeCuda, Graph
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.nccl import FakeNccl, Links, joined_on
from tests.gpu.batch_builder import running
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens
from tests.parallel.test_rank_traces import RankThread

NUM_RANKS = 2
PATIENCE_S = 4.0
PROMPTS = [[(5 * i * i + seed * i + 3) % VOCAB for i in range(4 + 3 * seed)] for seed in (1, 2)]


class SummedModel(HashModel):
    """What one rank computes and the others do not, summed over ranks: the same for all."""

    def __init__(self, ranks: Collectives, device: torch.device) -> None:
        super().__init__(device=device)
        self.ranks = ranks

    def hidden(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        own = super().hidden(input_ids, positions, attend)
        return self.ranks.sum(own if self.ranks.rank == 0 else torch.zeros_like(own))


class CapturingCuda(FakeCuda):
    """Fails in the captures of these numbers, from 1 on."""

    def __init__(self, seed: int | None, failing: tuple[int, ...] = ()) -> None:
        super().__init__(seed)
        self._failing = failing
        self._num_graphs = 0

    def new_graph(self) -> Graph:
        self._num_graphs += 1
        if self._num_graphs in self._failing:
            raise RuntimeError("no capture, as the test wants it")
        return super().new_graph()


class Rank:
    """One rank with its device. `executor` has a model that sums over all ranks."""

    def __init__(
        self, group: FakeNccl, place: Coordinates, patience: Patience, **options: Any
    ) -> None:
        self.group, self.place, cuda = group, place, group.cuda
        with cuda:
            device = CudaDevice(cuda)
            ranks = joined_on(device, group, place, patience)
            model = SummedModel(ranks, cuda.torch_device)
            options = {"attention": "torch-ref", "shares_memory": False, **options}
            self.executor = make_executor(model, device=device, ranks=ranks, **options)

    @property
    def captured(self) -> list[object]:
        """The shapes of its graphs, in the order in which they were captured."""
        return list(self.executor._graphs._graphs)


def ranks_on(cudas: list[FakeCuda], store: Path, patience: Patience, **options: Any) -> list[Rank]:
    links = Links(NUM_RANKS)

    def make(rank: int) -> Rank:
        place = Coordinates(rank, NUM_RANKS, store=str(store))
        return Rank(FakeNccl(cudas[rank], links, rank), place, patience, **options)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(make, range(NUM_RANKS)))


def engine_of(ranks: list[Rank], patience: Patience) -> ParallelExecutor:
    own, *others = ranks
    threads = [RankThread(rank.place, rank.executor, patience) for rank in others]
    return ParallelExecutor(own.executor, threads, patience)


def capture_all(ranks: list[Rank]) -> None:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        list(pool.map(lambda rank: captured(rank.executor), ranks))


@pytest.mark.slow
@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("failing", [(), (2,)])
def test_ranks_capture_the_same_shapes_in_the_same_order_wherever_one_of_them_fails(
    *, at_start: bool, failing: tuple[int, ...], tmp_path: Path
) -> None:
    """Each capture runs its step once before, with collectives; so does each replay."""
    patience = Patience(PATIENCE_S)
    cudas: list[FakeCuda] = [CapturingCuda(None), CapturingCuda(1, failing)]
    ranks = ranks_on(cudas, tmp_path / "store", patience, graph_rows=2)
    if at_start:
        capture_all(ranks)
    asked = [request(f"r{n}", ids, seed=n, max_tokens=8 + 6 * n) for n, ids in enumerate(PROMPTS)]
    served = serve(engine_of(ranks, patience), asked, chaos=1)
    assert served.outputs == plain_tokens(asked)
    first, second = ranks
    assert first.captured == second.captured
    assert first.captured
    assert first.group.met == second.group.met
    assert all(cuda.num_replays > 2 for cuda in cudas)
    for cuda in cudas:
        cuda.assert_sound()


async def test_a_rank_that_does_not_come_to_a_collective_on_the_device_ends_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for an event behind the collective, and nothing else runs."""
    monkeypatch.setattr(rank_watch, "DEVICE_S", 0.1)
    patience = Patience(PATIENCE_S)
    own, other = ranks_on([FakeCuda(1), FakeCuda(2)], tmp_path / "store", patience, graph_rows=0)
    patience.seconds = 0.1
    async with running(own.executor) as builder:
        own.executor.launch(builder.batch({2: PROMPTS[0]}, sampling=[2]))
        async with asyncio.timeout(PATIENCE_S):
            reason = await own.executor.died
    assert isinstance(reason, RankLost)
    assert "its device has not ended a step" in str(reason)
    assert own.group.has_aborted
    assert patience.lost.result() == str(reason)
    assert not other.group.has_aborted


async def test_ranks_end_though_their_device_never_comes_back(tmp_path: Path) -> None:
    patience = Patience(PATIENCE_S)
    ranks = ranks_on([FakeCuda(1), FakeCuda(2)], tmp_path / "store", patience, graph_rows=0)
    engine = engine_of(ranks, patience)
    engine.start(asyncio.get_running_loop())
    patience.end("the test wants it")
    patience.end("too late")
    async with asyncio.timeout(PATIENCE_S):
        reason = await engine.died
    assert isinstance(reason, EngineDead)
    assert reason.message == "the test wants it"
    [thread] = engine.ranks
    assert isinstance(thread, RankThread)
    await asyncio.to_thread(thread._thread.join, PATIENCE_S)
    assert not thread._thread.is_alive()
    thread.close()
    await asyncio.to_thread(ranks[0].executor.close)


def test_the_end_of_a_rank_is_noticed_while_the_device_is_waited_for(tmp_path: Path) -> None:
    """An engine that closes ends its ranks while nobody waits."""
    patience, aborted = Patience(), [0]

    def abort() -> None:
        aborted[0] += 1

    places = [Coordinates(rank, 2, store=str(tmp_path / "store")) for rank in range(2)]
    own, other = (RankWatch(place, patience, abort) for place in places)
    assert own._locks is not None
    own._locks.watch()
    with own.waiting():
        assert not own.look()
    del other
    assert not own.look()
    with pytest.raises(RankLost, match="rank 0 has lost rank 1, which has ended"), own.waiting():
        assert own.look()
    assert aborted == [1]
    assert patience.lost.result() == "rank 0 has lost rank 1, which has ended"


def test_fewer_gpus_than_ranks_are_refused_and_auto_takes_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on this machine need a GPU each, and torch fin"):
        open_device("cuda", devices_of(0, 2))
    device = open_device("auto", devices_of(0, 2))
    assert device.torch_device.type == "cpu"
    assert "need a GPU each" in device.about
