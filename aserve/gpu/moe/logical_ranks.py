"""Ranks of expert parallelism within one process, over a link that may be slow.

Each logical rank has a decoder with its own part of the experts, and runs stage by stage; all take
a stage in turns (`together`). What a rank posts lies in a box until the others take it, and becomes
readable when a link of that speed would have brought it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.moe.two_batches import Stages
from aserve.gpu.weights.source import ExpertPart, Shard

Parts = Sequence[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of each rank. Without a speed, everything arrives at once."""

    bytes_per_s: float | None = None

    def seconds(self, parts: Parts) -> float:
        if self.bytes_per_s is None:
            return 0.0
        return sum(tensor.nbytes for part in parts for tensor in part) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Posted:
    parts: Parts
    arrives_s: float  # of time.perf_counter()


@dataclass(slots=True)
class LogicalRanks:
    """Keeps what each rank has posted, in the order of its exchanges."""

    num_ranks: int
    link: Link = Link()
    posted: list[list[Posted]] = field(init=False)

    def __post_init__(self) -> None:
        self.posted = [[] for _ in range(self.num_ranks)]

    @property
    def num_bytes(self) -> int:
        """Returns the size of all that the ranks have posted."""
        parts = [part for box in self.posted for each in box for part in each.parts]
        return sum(tensor.nbytes for part in parts for tensor in part)

    def clear(self) -> None:
        """Empties all boxes, between forwards."""
        for box in self.posted:
            box.clear()

    def exchanges(self) -> list[LogicalExchange]:
        return [LogicalExchange(self, rank) for rank in range(self.num_ranks)]

    def shard(self, rank: int) -> Shard:
        """The part of the weights that a rank holds."""
        return Shard(experts=ExpertPart(rank, self.num_ranks))


@dataclass(frozen=True, slots=True)
class LogicalExchange:
    """An `Exchange`."""

    ranks: LogicalRanks
    rank: int

    @property
    def num_ranks(self) -> int:
        return self.ranks.num_ranks

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, parts: Parts) -> int:
        mine = self.ranks.posted[self.rank]
        arrives_s = time.perf_counter() + self.ranks.link.seconds(parts)
        mine.append(Posted(parts, arrives_s))
        return len(mine) - 1

    def finish(self, posted: object) -> Parts:
        """Raises BugError if a rank has not posted, because a real link would wait for ever."""
        assert isinstance(posted, int)
        boxes = self.ranks.posted
        missing = [rank for rank, box in enumerate(boxes) if len(box) <= posted]
        if missing:
            raise BugError(f"rank {self.rank} would wait for ranks {missing} for ever")
        arrived = [box[posted] for box in boxes]
        rest_s = max(each.arrives_s for each in arrived) - time.perf_counter()
        if rest_s > 0:
            threading.Event().wait(rest_s)
        return [each.parts[self.rank] for each in arrived]


def together(ranks: Sequence[Stages]) -> list[Tensor]:
    """Runs one stage of each rank in turns, and returns their results. All ranks have equally many
    stages, whether they have tokens or not."""
    results: list[Tensor] = []
    while not results:
        for stages in ranks:
            try:
                next(stages)
            except StopIteration as stop:
                results.append(stop.value)
    if len(results) < len(ranks):
        raise BugError(f"only {len(results)} of {len(ranks)} ranks are done: their stages differ")
    return results
