"""Stages of a pipeline whose hidden states and drafts go from device to device: the hosts exchange
headers alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.device import ranks
from aserve.gpu.device.base import Device
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.ranks import BACKENDS, RankBackend
from aserve.gpu.layers.norm import SumAndNorm, add_rms_norm
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.models.load import make_loader
from aserve.gpu.parallel import nccl
from aserve.gpu.parallel.collectives import Collectives, GroupCollectives, gloo_group
from aserve.gpu.parallel.device_collectives import DeviceGroup, GroupLink, Peer
from aserve.gpu.parallel.pipe import Pipe, neighbours
from aserve.gpu.parallel.stages import Pipeline, StagedDecoder
from aserve.gpu.weights.source import Stage, Target
from aserve.parallel.topology import Coordinates, Patience
from aserve.tiny import MODEL_DIR
from tests.fakes.cuda import FakeCuda
from tests.fakes.hash_model import HashModel
from tests.fakes.nccl import FakeNccl, Links
from tests.gpu.drive import make_executor, serve
from tests.parallel.test_rank_traces import joined
from tests.parallel.test_ranks import CROWDED, asks, loaded, resolved_of

ASKED = asks()[1::3]  # greedy and penalized
DRAFTS = {"speculative_algorithm": "EAGLE3"}
TREE = {**DRAFTS, "speculative_topk": 3, "speculative_num_steps": 3}


def no_stream(_data: Tensor) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def over_gloo(place: Coordinates, world: Collectives, device: torch.device) -> GroupLink:
    before, after = neighbours(place)
    group = cast(DeviceGroup, gloo_group(place.among_all, name="link"))
    world.least(0)
    return GroupLink(
        device, before=Peer(group, before), after=Peer(group, after), sending=no_stream
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 3},
        {"pipeline_parallel_size": 2, **DRAFTS},
        {"pipeline_parallel_size": 3, **TREE},
    ],
    ids=["three stages", "two stages, the last of which drafts", "three stages with trees"],
)
def test_stages_whose_tensors_go_by_a_link_give_the_tokens_of_one_device(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, over gloo: the sockets carry the headers alone."""

    def open_link(
        device: Device, place: Coordinates, _patience: Patience, world: Collectives
    ) -> GroupLink:
        return over_gloo(place, world, device.torch_device)

    by_link = RankBackend(BACKENDS["cpu"].join, shares_memory=False, open_link=open_link)
    monkeypatch.setattr(ranks, "BACKENDS", {"cpu": by_link})
    executor = joined(resolved_of(**options, **CROWDED), tmp_path / "store")
    many = serve(executor, ASKED, chaos=3)
    assert many.outputs == serve(loaded(), ASKED).outputs
    assert many.num_resyncs == 0
    assert any(batch.verify is not None for batch in many.batches) is (len(options) > 1)


def test_no_host_waits_for_what_a_device_sends_or_receives() -> None:
    """On simulated CUDA, in threads of the name of an executor's: there a wait is a hazard. The
    sender has forgotten what it sent before it arrives."""
    links, cudas = Links(2), [FakeCuda(), FakeCuda()]
    after, before = socket.socketpair()
    found: list[Tensor] = []

    def pipe_on(rank: int, device: CudaDevice) -> Pipe:
        other = Peer(FakeNccl(cudas[rank], links, rank), 1 - rank)
        sending = device.side_stream().reading
        link = GroupLink(device.torch_device, before=other, after=other, sending=sending)
        return Pipe(before if rank else None, None if rank else after, link)

    def send() -> None:
        device = CudaDevice(cudas[0])
        with device.stream():
            pipe_on(0, device).send(1, torch.ones(3, 2, device=device.torch_device) + 1)
            torch.zeros(3, 2, device=device.torch_device)

    def receive() -> None:
        device = CudaDevice(cudas[1])
        with device.stream():
            into = torch.empty(3, 2, device=device.torch_device)
            assert pipe_on(1, device).receive(1, into)
            found.append(into * 2)

    threads = [threading.Thread(target=run, name="aserve-executor") for run in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ThreadPoolExecutor(2) as pool:  # the devices run only now
        list(pool.map(FakeCuda.synchronize, cudas))
    assert cudas[1].read(found[0]).tolist() == [[4.0] * 2] * 3
    for cuda in cudas:
        cuda.assert_sound()


def test_stages_capture_no_graphs() -> None:
    """Their hosts talk within a step, which no replay does."""
    with FakeCuda() as cuda:
        device = CudaDevice(cuda)
        model = HashModel(device=cuda.torch_device)
        make = functools.partial(make_executor, model, device=device, attention="torch-ref")
        abouts = [make().about, make(pipeline=Pipeline(Stage(0, 2))).about]
    assert ["no graphs" in about for about in abouts] == [False, True]


def links_on(places: list[Coordinates], monkeypatch: pytest.MonkeyPatch) -> list[GroupLink]:
    """Joined as by NCCL, over a group of gloo."""
    monkeypatch.setattr(nccl, "nccl_group", gloo_group)
    patience = Patience(10.0)

    def join(place: Coordinates) -> GroupLink:
        world = GroupCollectives(place.among_all, patience)
        cpu = torch.device("cpu")
        return nccl.link_by_nccl(place, patience, cpu, world, sending=no_stream)[0]

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(join, places))


def test_neighbours_of_a_ring_meet_and_a_pipe_drops_what_was_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in each of three stages send to those of their number in the next one. A message of
    another size than the step has is taken off the link, so the next one is read in full."""
    places = [Coordinates(rank, 2, str(tmp_path / "s"), 3) for rank in range(6)]
    links = links_on(places, monkeypatch)
    first, last = links[4], links[2]
    after, before = socket.socketpair()
    sender, receiver = Pipe(None, after, first), Pipe(before, None, last)
    with ThreadPoolExecutor(1) as pool:

        def send() -> None:
            for iteration, size in enumerate((3, 3, 5, 0, 3)):
                sender.send(iteration, torch.full((size, 2), float(iteration)))

        sent = pool.submit(send)
        into = torch.empty(3, 2)
        assert receiver.receive(1, into)
        assert into.tolist() == [[1.0] * 2] * 3
        with pytest.raises(BugError, match="step 2: 40 bytes came in place of 24"):
            receiver.receive(2, into)
        assert receiver.receive(4, into)
        assert into.tolist() == [[4.0] * 2] * 3
        sent.result()


def test_a_stage_begins_with_the_norm_of_a_kernel_that_also_adds() -> None:
    def add_norm(weight: Tensor, /, *, eps: float, scale: float) -> SumAndNorm:
        plain = add_rms_norm(weight, eps=eps, scale=scale)
        return lambda hidden, added: plain(hidden, added)

    def normed(elementwise: Elementwise) -> Tensor:
        target = Target(stage=Stage(1, 2), elementwise=elementwise)
        loader, _ = make_loader(MODEL_DIR)
        part = Pipeline(Stage(1, 2), Pipe(None, None)).part_of(
            loader.load(LoadPlan(torch.float32, target=target))
        )
        assert isinstance(part, StagedDecoder)
        x = torch.randn(3, part.hidden_size, generator=torch.Generator().manual_seed(1))
        return part.first_norm(x)

    assert torch.equal(normed(dataclasses.replace(PLAIN, add_norm=add_norm)), normed(PLAIN))


def test_a_wait_for_the_device_is_watched_for_its_stage_and_for_all() -> None:
    cuda, entered = FakeCuda(), []

    def watch(name: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def waiting() -> Iterator[None]:
            entered.append(name)
            yield

        return waiting

    device = CudaDevice(cuda)
    device.watch_waits(watch("stage"))
    device.watch_waits(watch("all"))
    device.mark().synchronize()
    assert entered == ["stage", "all"]
