"""Collectives between the ranks of an engine, by torch.distributed with gloo.

A sum has the same bits on all ranks, because what follows it (norms, sampling) runs on each rank
alone and must come to the same tokens. Each rank gathers all parts and adds them in the order of
the ranks. A decode step is bound by latency, and this takes one exchange where a ring takes two.

Groups are objects of the engine that made them, so one process may have several.
"""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # not exported
    AllgatherOptions,
)

from aserve.gpu.parallel.meeting import host_of, store_of
from aserve.parallel.topology import Coordinates, Patience, RankLost

COLLECTIVE_S = 60.0  # until all ranks have come to an all-to-all


class Collectives(Protocol):
    """Every rank enters every collective, in the same order, with tensors of the same shape."""

    rank: int
    num_ranks: int

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks. `x` may be overwritten."""

    def concat(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks, joined along the last axis in the order of ranks."""

    def least(self, number: int) -> int:
        """Returns the smallest of the ranks' numbers. It blocks."""


class Alone:
    """The collectives of an engine of one rank."""

    rank = 0
    num_ranks = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def concat(self, x: Tensor) -> Tensor:
        return x

    def least(self, number: int) -> int:
        return number


ALONE = Alone()


def collectives_of(place: Coordinates, patience: Patience) -> Collectives:
    """Meets the other ranks on the CPU. Those of one machine share memory, and others, or ranks
    without numba, meet over gloo."""
    if place.cluster is not None or find_spec("numba") is None:
        return GroupCollectives(place, patience)
    from aserve.gpu.parallel.shared import SharedCollectives

    return SharedCollectives(place, patience)


class GroupCollectives:
    """`Collectives` of one process group. A rank that is lost ends the caller with RankLost."""

    __slots__ = ("_group", "_patience", "num_ranks", "rank")

    def __init__(self, place: Coordinates, patience: Patience) -> None:
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self._patience = patience
        try:
            self._group = gloo_group(place)
        except RuntimeError as error:
            raise RankLost(f"the ranks did not meet: {error}") from error

    def sum(self, x: Tensor) -> Tensor:
        parts = self._gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def concat(self, x: Tensor) -> Tensor:
        return torch.cat(tuple(self._gather(x)), dim=-1)

    def least(self, number: int) -> int:
        own = torch.tensor([number], dtype=torch.int64)
        return int(self._gather(own).min())

    def _gather(self, x: Tensor) -> Tensor:
        """Returns the ranks' tensors, [ranks, *x.shape]. They travel as bytes, of any dtype."""
        parts = x.new_empty((self.num_ranks, *x.shape))
        if not x.numel():
            return parts
        own, *every = (t.view(-1).view(torch.uint8) for t in (x.contiguous(), *parts))
        try:
            options = AllgatherOptions()
            options.timeout = timedelta(seconds=self._patience.seconds)
            self._group.allgather([every], [own], options).wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} has lost another rank: {error}") from error
        return parts


class Work(Protocol):
    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


class ProcessGroup(Protocol):
    """Types the part of torch's process groups that is used; their stubs have no collectives."""

    def allgather(
        self, every: list[list[Tensor]], own: list[Tensor], options: AllgatherOptions, /
    ) -> Work: ...


def gloo_group(place: Coordinates, *, name: str = "sums") -> ProcessGroup:
    """Meets the other ranks, which reach this one at `host_of`. Groups of different names are
    apart."""
    store = store_of(place, name)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stub
    options._devices = [ProcessGroupGloo.create_device(hostname=host_of(place))]
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    return cast(ProcessGroup, ProcessGroupGloo(store, place.rank, place.num_ranks, options))
