"""The all-to-all between the processes of expert-parallel ranks, by torch.distributed: with gloo on
the CPU, and with NCCL between GPUs.

The parts for a rank travel as bytes, all of an exchange in one call. Where shapes depend on the
routing, the hosts first tell each other how many rows will come, and wait for that. With fixed
shapes nobody waits, so that CUDA graphs may have the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from aserve.gpu.parallel.collectives import Collectives, Work, gloo_group
from aserve.gpu.parallel.device_collectives import DeviceCollectives, DeviceGroup
from aserve.parallel.topology import Coordinates, RankLost

Part = tuple[Tensor, ...]


def all_to_all_of(place: Coordinates, ranks: Collectives) -> DeviceGroup:
    """Returns the group of ranks on devices. On the host the ranks meet, in a group beside that of
    their sums."""
    if isinstance(ranks, DeviceCollectives):
        return ranks.group
    return cast(DeviceGroup, gloo_group(place, name="experts"))


@dataclass(frozen=True, slots=True)
class Posted:
    """An exchange that was started."""

    work: Work | None
    sent: Tensor  # bytes, which must live until they have been sent
    received: Tensor  # bytes
    sizes: list[int]  # bytes from each rank
    num_rows: list[int] | None  # rows from each rank; None: as many as went there
    like: Part  # what went to one rank


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """An `Exchange`. With `has_fixed_shapes`, all parts of an exchange have the same shapes, on all
    ranks; else all tensors of a part have as many rows as its first one.
    """

    group: DeviceGroup
    ranks: Collectives
    has_fixed_shapes: bool

    @property
    def num_ranks(self) -> int:
        return self.ranks.num_ranks

    def waiting(self) -> AbstractContextManager[None]:
        ranks = self.ranks
        return ranks.waiting() if isinstance(ranks, DeviceCollectives) else nullcontext()

    def start(self, parts: Sequence[Part]) -> Posted:
        like = parts[0]
        sent_sizes = [sum(tensor.nbytes for tensor in part) for part in parts]
        sizes, num_rows = sent_sizes, None
        if not self.has_fixed_shapes:
            num_rows = self._counts([len(part[0]) for part in parts])
            row_bytes = sum(_num_bytes(tensor, 1) for tensor in like)
            sizes = [count * row_bytes for count in num_rows]
        sent = torch.cat([_as_bytes(tensor) for part in parts for tensor in part])
        received = sent.new_empty(sum(sizes))
        work = self._post(received, sent, sizes, sent_sizes)
        return Posted(work, sent, received, sizes, num_rows, like)

    def finish(self, posted: object) -> Sequence[Part]:
        assert isinstance(posted, Posted)
        self._wait(posted.work)
        counts: Sequence[int | None] = posted.num_rows or [None] * self.num_ranks
        pieces = posted.received.split(posted.sizes)
        return [_unpacked(*each, posted.like) for each in zip(pieces, counts, strict=True)]

    def _counts(self, counts: list[int]) -> list[int]:
        """Returns the rows that come from each rank, of those that go to each."""
        host = self.ranks.host if isinstance(self.ranks, DeviceCollectives) else self.ranks
        every = host.concat(torch.tensor(counts)).view(self.num_ranks, -1)
        return [int(count) for count in every[:, self.ranks.rank]]

    def _post(
        self, received: Tensor, sent: Tensor, sizes: list[int], sent_sizes: list[int]
    ) -> Work | None:
        try:
            return self.group.alltoall_base(received, sent, sizes, sent_sizes)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Work | None) -> None:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RankLost:
        return RankLost(f"rank {self.ranks.rank} has lost another rank: {error}")


def _num_bytes(tensor: Tensor, num_rows: int) -> int:
    return num_rows * math.prod(tensor.shape[1:]) * tensor.itemsize


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _unpacked(piece: Tensor, num_rows: int | None, like: Part) -> Part:
    """NOTE: each tensor is copied, because a view of another dtype has to be aligned."""
    counts = [len(tensor) if num_rows is None else num_rows for tensor in like]
    sizes = [_num_bytes(tensor, count) for tensor, count in zip(like, counts, strict=True)]
    return tuple(
        part.clone().view(tensor.dtype).view(count, *tensor.shape[1:])
        for part, count, tensor in zip(piece.split(sizes), counts, like, strict=True)
    )
