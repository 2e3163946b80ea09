"""Collectives of tensors on devices, on the stream of the caller. They do not wait for the device,
and can be captured in graphs.

    sum       an all-reduce, by the first way (all_reduce.py) that takes the tensor
    concat    an all-gather
    least     of numbers of the host, which the ranks exchange by gloo

All ranks get the same bits of a sum: each way has every element added up in one order, by one rank
that gives it to the others, or by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # not exported
    AllgatherOptions,
    AllreduceOptions,
)

from aserve.gpu.parallel.all_reduce import AllReduce
from aserve.gpu.parallel.collectives import Collectives, Work
from aserve.gpu.parallel.fused_norm import FusedSumNorm


class DeviceGroup(Protocol):
    """Types the part of ProcessGroupNCCL that is used. The group of gloo has it too. NCCL returns
    None where a call is in order with the caller's stream, and gloo a `Work`."""

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> Work | None: ...

    def _allgather_base(
        self, every: Tensor, own: Tensor, options: AllgatherOptions, /
    ) -> Work | None: ...

    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], /
    ) -> Work | None: ...

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work | None: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work | None: ...

    def abort(self) -> None: ...


WaitContext: TypeAlias = Callable[[], AbstractContextManager[None]]
# Makes a sum that is fused with the norm behind it, for a hidden size and dtype; None: there is
# none. All ranks call it.
MakeFused: TypeAlias = Callable[[int, torch.dtype], FusedSumNorm | None]


class DeviceCollectives:
    """`Collectives` of one device per rank."""

    __slots__ = ("_ways", "group", "host", "make_fused", "num_ranks", "rank", "waiting")

    def __init__(
        self, host: Collectives, group: DeviceGroup, ways: Sequence[AllReduce] = ()
    ) -> None:
        """`host` exchanges numbers. A tensor that none of `ways` takes is summed by the group."""
        self.waiting: WaitContext = nullcontext  # for those who wait for the device within a step
        self.rank, self.num_ranks = host.rank, host.num_ranks
        self.host = host
        self.make_fused: MakeFused | None = None
        self.group = group
        self._ways = tuple(ways)

    def sum(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        x = x.contiguous()
        for way in self._ways:
            if way.takes(x):
                return way(x)
        return self.group_sum(x)

    def group_sum(self, x: Tensor) -> Tensor:
        """The sum by the process group, in place. x is contiguous and not empty."""
        options = AllreduceOptions()
        options.asyncOp = False  # on the caller's stream
        _wait(self.group.allreduce([x], options))
        return x

    def concat(self, x: Tensor) -> Tensor:
        return torch.cat(tuple(self.gather(x)), dim=-1)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the ranks' tensors, [ranks, *x.shape]."""
        every = x.new_empty((self.num_ranks, *x.shape))
        if x.numel():
            options = AllgatherOptions()
            options.asyncOp = False
            own = x.contiguous().view(-1)
            _wait(self.group._allgather_base(every.view(-1), own, options))
        return every

    def least(self, number: int) -> int:
        return self.host.least(number)


# Makes the context of a send, in which the caller's stream is one that no forward waits for.
Sending: TypeAlias = Callable[[Tensor], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A neighbour, and the group in which this rank exchanges with it."""

    group: DeviceGroup
    rank: int


class GroupLink:
    """A `DeviceLink` between the neighbours of a ring.

    NOTE: it knows no deadlock if `before` and `after` are of two groups wherever they are the same
    rank. Then the two ends of a communicator do the same in the same order: one sends, and the
    other receives. No forward waits for a send, so what a rank receives depends on what its sender
    has computed by then, and on nothing that the sender receives later. With one communicator for
    both directions, two ranks that send at once would wait for each other. Kernels of several
    communicators may wait on a GPU at once if all of them fit there: these take a few blocks each.
    """

    __slots__ = ("_after", "_before", "_sending", "_unsent", "device")

    def __init__(
        self, device: torch.device, *, before: Peer, after: Peer, sending: Sending
    ) -> None:
        self._before, self._after = before, after
        self._sending = sending
        self._unsent: list[tuple[Work, Tensor]] = []  # whose memory must live until then
        self.device = device

    def send(self, data: Tensor) -> None:
        with self._sending(data):
            work = self._after.group.send([data], self._after.rank, 0)
        if work is not None:
            self._unsent.append((work, data))
        self._unsent = [each for each in self._unsent if not each[0].is_completed()]

    def receive(self, into: Tensor) -> None:
        _wait(self._before.group.recv([into], self._before.rank, 0))

    def is_right(self, own: int, *, is_first: bool) -> bool:
        """Sends a number around the ring, and returns whether that of the rank before came. It
        blocks. NOTE: the first call between two ranks may wait for the other one, so all stages but
        the first one receive before they send."""
        sent = torch.full((1,), own % 256, dtype=torch.uint8, device=self.device)
        received = torch.empty_like(sent)
        if is_first:
            self.send(sent)
        self.receive(received)
        if not is_first:
            self.send(sent)
        on_host = torch.empty(1, dtype=torch.uint8).copy_(received)
        return bool((on_host == self._before.rank % 256).all())


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()
