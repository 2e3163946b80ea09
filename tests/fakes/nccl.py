"""NCCL on simulated CUDA (cuda.py): a collective is work of its stream, and the ranks, which are
threads, meet in it when that work runs. So a graph keeps it, and each replay meets again.

What two ranks send each other is in order, whichever way it goes: the n-th call of one of them
meets the n-th of the other, and each keeps its stream until both have come. Where both send, or
both receive, neither ever ends, as with messages of NCCL that are not buffered.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # not exported
    AllgatherOptions,
    AllreduceOptions,
)

from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.parallel.collectives import GroupCollectives
from aserve.gpu.parallel.device_collectives import DeviceCollectives
from aserve.gpu.parallel.rank_watch import RankWatch
from aserve.parallel.topology import Coordinates, Patience
from tests.fakes.cuda import FakeCuda, Work


@dataclass
class Call:
    """One end of a message. `values` are those of the device."""

    sends: bool
    values: Tensor
    has_ended: bool = False


class Links:
    """Where the parts of all ranks are, by the number of the collective."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.changed = threading.Condition()
        self.parts: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        # By the two ranks and the number of the call between them: what each of them does.
        self.calls: defaultdict[tuple[int, int, int], dict[int, Call]] = defaultdict(dict)
        self.stuck: set[str] = set()


class FakeNccl:
    """Implements DeviceGroup. As NCCL's, its calls return nothing that could be waited for. `met`
    has the shape of each collective that has run."""

    def __init__(self, cuda: FakeCuda, links: Links, rank: int) -> None:
        self.met: list[tuple[int, ...]] = []
        self.has_aborted = False
        self._calls: defaultdict[int, list[Call]] = defaultdict(list)  # with each other rank
        self.cuda, self._links, self._rank = cuda, links, rank

    def allreduce(self, tensors: list[Tensor], _options: AllreduceOptions, /) -> None:
        [x] = tensors
        twin, block = self.cuda._twin(x), self.cuda._block(x)

        def run() -> None:
            twin.copy_(sum(self._exchange(twin), torch.zeros_like(twin)))

        self.cuda.ask(Work("an all-reduce", [block], [block], run))

    def _allgather_base(self, every: Tensor, own: Tensor, _options: AllgatherOptions, /) -> None:
        source, target = self.cuda._twin(own), self.cuda._twin(every)
        blocks = [self.cuda._block(own)], [self.cuda._block(every)]

        def run() -> None:
            target.copy_(torch.cat(self._exchange(source)))

        self.cuda.ask(Work("an all-gather", *blocks, run))

    def alltoall_base(
        self, received: Tensor, sent: Tensor, sizes: list[int], sent_sizes: list[int], /
    ) -> None:
        source, target = self.cuda._twin(sent), self.cuda._twin(received)
        counts = torch.tensor(sent_sizes)

        def run() -> None:
            """Each rank gives all that it sends, behind the counts."""
            every, head = self._exchange(torch.cat((counts.view(torch.uint8), source))), len(counts)
            parts = []
            for each in every:
                given = each[: 8 * head].clone().view(torch.int64).tolist()
                parts.append(each[8 * head :].split(given)[self._rank])
            assert [len(part) for part in parts] == sizes
            target.copy_(torch.cat(parts))

        blocks = [self.cuda._block(sent)], [self.cuda._block(received)]
        self.cuda.ask(Work("an all-to-all", *blocks, run))

    def send(self, tensors: list[Tensor], rank: int, _tag: int, /) -> None:
        [x] = tensors
        run = self._call(rank, Call(sends=True, values=self.cuda._twin(x)))
        self.cuda.ask(Work("a send", [self.cuda._block(x)], [], run))

    def recv(self, tensors: list[Tensor], rank: int, _tag: int, /) -> None:
        [x] = tensors
        run = self._call(rank, Call(sends=False, values=self.cuda._twin(x)))
        self.cuda.ask(Work("a receive", [], [self.cuda._block(x)], run))

    def _call(self, rank: int, call: Call) -> Callable[[], None]:
        """Returns the work of a call, which the other rank has to make as well."""
        own, links, made = self._rank, self._links, self._calls[rank]
        low, high = sorted((own, rank))
        number, before = len(made), made[-1:]
        made.append(call)

        def run() -> None:
            with links.changed:
                self._until(lambda: all(each.has_ended for each in before))
                both = links.calls[low, high, number]
                both[own] = call
                self._until(lambda: rank in both)
                if both[rank].sends == call.sends:
                    links.stuck.add("both send" if call.sends else "both receive")
                self._until(lambda: both[rank].sends != call.sends)
                if not call.sends:
                    call.values.copy_(both[rank].values)
                    call.has_ended = both[rank].has_ended = True
                self._until(lambda: call.has_ended)
            self.met.append(tuple(call.values.shape))

        return run

    def abort(self) -> None:
        """What waits for another rank fails."""
        with self._links.changed:
            self.has_aborted = True
            self._links.changed.notify_all()

    def _exchange(self, own: Tensor) -> list[Tensor]:
        links = self._links
        parts = links.parts[len(self.met)]
        with links.changed:
            parts[self._rank] = own.clone()
            self._until(lambda: len(parts) == links.num_ranks)
        self.met.append(tuple(own.shape))
        return [parts[rank] for rank in range(links.num_ranks)]

    def _until(self, is_done: Callable[[], bool]) -> None:
        """Waits for the other ranks. The caller holds `changed`."""
        self._links.changed.notify_all()
        self._links.changed.wait_for(lambda: self.has_aborted or is_done())
        if self.has_aborted:
            raise RuntimeError("NCCL was aborted")


def joined_on(
    device: CudaDevice, group: FakeNccl, place: Coordinates, patience: Patience
) -> DeviceCollectives:
    """Joins ranks as `join_by_nccl` does."""
    host = GroupCollectives(place, patience)
    watch = RankWatch(place, patience, group.abort)
    host.least(0)
    watch.start()
    device.watch_waits(watch.waiting)
    return DeviceCollectives(host, group)
