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


class GroupLink:
    """A `DeviceLink` between two neighbours of a group of all stages' ranks."""

    __slots__ = ("_after", "_before", "_group", "device")

    def __init__(
        self, group: DeviceGroup, device: torch.device, *, before: int, after: int
    ) -> None:
        self._group, self._before, self._after = group, before, after
        self.device = device

    def send(self, data: Tensor) -> None:
        _wait(self._group.send([data], self._after, 0))

    def receive(self, into: Tensor) -> None:
        _wait(self._group.recv([into], self._before, 0))

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
        return bool((received == self._before % 256).all())


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()
