"""A whole engine of pipeline stages on simulated CUDA, each with a device that runs by itself: what
goes between them is work of the devices, in the order that NCCL has.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.gpu.device import ranks, registry
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.device.ranks import RankBackend, join_on_host
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.parallel import nccl
from aserve.gpu.parallel.device_collectives import GroupLink, Peer
from aserve.gpu.parallel.early_drafts import EarlyDrafts
from aserve.gpu.weights import checkpoint, files
from aserve.load import load_rank
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.topology import Coordinates, Patience
from aserve.progress import ignore_stage
from aserve.tiny import MODEL_DIR
from tests.e2e.server_process import REPOSITORY
from tests.fakes.driven_cuda import HANGS_S, DrivenCuda
from tests.fakes.nccl import FakeNccl, Links
from tests.gpu.drive import serve
from tests.gpu.parallel.test_device_stages import ASKED, DRAFTS, TREE, no_stream
from tests.parallel.test_rank_traces import RankThread
from tests.parallel.test_ranks import CROWDED, loaded, resolved_of

# Two threads ask for an operator for the first time, and its Python object is made slowly.
RACE = """
import threading, time
import torch
from torch._ops import OpOverload
from tests.fakes.cuda import FakeCuda

make, together = OpOverload.__init__, threading.Barrier(2)

def make_slowly(*arguments):
    make(*arguments)
    time.sleep(0.02)

def run():
    cuda = FakeCuda()
    with torch.inference_mode(), cuda.on(cuda.new_stream()):
        together.wait()
        for _ in range(5):
            torch.zeros(3).numpy()
            junk = [bytearray(300) for _ in range(1000)]
            time.sleep(0.05)

OpOverload.__init__ = make_slowly
for _ in range(2):
    threading.Thread(target=run).start()
"""


@pytest.mark.slow
def test_threads_of_devices_may_be_the_first_to_use_an_operator() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 0, done.stderr


class StoredFile:
    """A file of weights, whose tensors are copied to the device."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> StoredFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> Any:
        return self._file.keys()

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.to("meta")

    def get_slice(self, name: str) -> StoredSlice:
        return StoredSlice(self._file.get_slice(name))


class StoredSlice:
    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, part: Any) -> Tensor:
        tensor: Tensor = self._stored[part]
        return tensor.to("meta")


class Machine:
    """GPUs, one for each stage. `links`: by the name of the group."""

    def __init__(self, num_stages: int, *, hangs_s: float = HANGS_S) -> None:
        self.links = {name: Links(num_stages) for name in ("nccl", "nccl-back")}
        changed = self.links["nccl"].changed
        for links in self.links.values():
            links.changed = changed
        self.cudas = [DrivenCuda(changed, hangs_s=hangs_s) for _ in range(num_stages)]
        self.groups: list[FakeNccl] = []

    @contextlib.contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Within it, ranks load their parts on its devices."""
        open_ = files.open_file

        def open_for(path: Path, device: torch.device) -> Any:
            file = open_(path, torch.device("cpu"))
            return StoredFile(file) if device.type == "meta" else file

        monkeypatch.setattr(checkpoint, "open_file", open_for)
        monkeypatch.setattr(nccl, "nccl_group", lambda place, name: self.group(place.rank, name))
        monkeypatch.setattr(
            registry, "devices_of", lambda rank, _: {"cpu": lambda _: CudaDevice(self.cudas[rank])}
        )
        backend = RankBackend(join_on_host, shares_memory=False, open_link=ranks.link_on_cuda)
        monkeypatch.setattr(ranks, "BACKENDS", {"meta": backend})
        with self.closing():
            yield

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            for group in self.groups:
                group.abort()  # what still waits would keep the devices' threads
            for cuda in self.cudas:
                cuda.close()

    def group(self, rank: int, name: str) -> FakeNccl:
        group = FakeNccl(self.cudas[rank], self.links[name], rank)
        self.groups.append(group)
        return group

    def engine(self, store: Path, **options: Any) -> ParallelExecutor:
        num_stages, patience = len(self.cudas), Patience()
        resolved = resolved_of(
            pipeline_parallel_size=num_stages, attention_backend="torch-ref", **options
        )
        places = [Coordinates(rank, 1, str(store), num_stages) for rank in range(num_stages)]

        def load(place: Coordinates) -> TorchExecutor:
            with self.cudas[place.rank]:
                return load_rank(
                    resolved, MODEL_DIR, lambda: place, patience=patience, on_stage=ignore_stage
                )

        with ThreadPoolExecutor(num_stages) as pool:
            own, *others = pool.map(load, places)
        threads = [RankThread(*each, patience) for each in zip(places[1:], others, strict=True)]
        return ParallelExecutor(own, threads, patience)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("drafts", [{}, DRAFTS, TREE], ids=["plain", "chain", "tree"])
def test_stages_on_devices_that_run_behind_give_the_tokens_of_one(
    drafts: dict[str, Any], num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = EarlyDrafts.make

    def noted(early: EarlyDrafts, *arguments: Any) -> None:
        make(early, *arguments)
        made.extend(early.made)

    monkeypatch.setattr(EarlyDrafts, "make", noted)
    expected = serve(loaded(), ASKED).outputs
    machine = Machine(num_stages)
    with machine.running(monkeypatch):
        many = serve(machine.engine(tmp_path / "store", **CROWDED, **drafts), ASKED, chaos=3)
    for cuda in machine.cudas:
        cuda.assert_sound()
    assert many.outputs == expected
    assert many.num_resyncs == 0
    assert any(batch.verify is not None for batch in many.batches) is bool(drafts)
    assert bool(made) is bool(drafts)


@pytest.mark.parametrize(
    ("num_groups", "has_stream"), [(2, True), (1, True), (2, False)], ids=["so", "one", "in turn"]
)
def test_stages_that_both_send_first_need_a_group_for_each_direction_and_a_stream_for_sends(
    *, num_groups: int, has_stream: bool
) -> None:
    """The first stage sends hidden states and then receives drafts; the last one has sent drafts
    before it receives hidden states."""
    is_right = num_groups == 2 and has_stream
    names = ("nccl", "nccl-back")[:num_groups]
    machine = Machine(2, hangs_s=HANGS_S if is_right else 1.0)
    groups = [[machine.group(rank, name) for name in names] for rank in range(2)]
    arrived: list[Tensor] = []
    with machine.closing():
        for rank, cuda in enumerate(machine.cudas):
            device = CudaDevice(cuda)
            sending = device.side_stream().reading if has_stream else no_stream
            before, after = (
                groups[rank][:1] * 2 if num_groups == 1 else groups[rank][:: 1 - 2 * rank]
            )
            peers = Peer(before, 1 - rank), Peer(after, 1 - rank)
            link = GroupLink(cuda.torch_device, before=peers[0], after=peers[1], sending=sending)
            with device.stream():
                link.send(torch.full((2,), 7 + rank, dtype=torch.uint8, device="meta"))
                arrived.append(torch.zeros(2, dtype=torch.uint8, device="meta"))
                link.receive(arrived[-1])
        with contextlib.nullcontext() if is_right else pytest.raises(AssertionError, match="hangs"):
            found = [cuda.read(x).tolist() for cuda, x in zip(machine.cudas, arrived, strict=True)]
            assert found == [[8, 8], [7, 7]]
    assert machine.links["nccl"].stuck == ({"both send"} if num_groups == 1 else set())
