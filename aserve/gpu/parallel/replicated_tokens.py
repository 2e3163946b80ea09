"""Dispatchers of ranks that all have the same tokens, because their attention is tensor parallel or
replicated.

Either each rank computes its own experts for all tokens, and one sum over the ranks adds up the
results; or each rank sends a part of the tokens by an all-to-all, and all ranks gather the parts'
sums. In both, the ranks come to results of the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.layers.grouped_linear import Groups
from aserve.gpu.moe.dispatch import (
    Arrived,
    Combining,
    Dispatcher,
    OwnRows,
    Sent,
    own_rows,
)
from aserve.gpu.moe.routing import Routed
from aserve.gpu.parallel.collectives import Collectives


class SummedDispatcher:
    """The `Dispatcher` that sends no rows. Rank r has the experts from r * n to (r + 1) * n."""

    __slots__ = ("_num_own", "_ranks")

    def __init__(self, num_experts: int, ranks: Collectives) -> None:
        self._ranks = ranks
        self._num_own = num_experts // ranks.num_ranks

    def start(self, x: Tensor, routed: Routed) -> SummedRows:
        local = routed.experts - self._ranks.rank * self._num_own
        rows = own_rows(x, local, routed.weights, num_own=self._num_own)
        return SummedRows(rows, self._ranks)


@dataclass(frozen=True, slots=True)
class SummedRows:
    """Both `Sent` and `Arrived`."""

    rows: OwnRows
    ranks: Collectives

    @property
    def x(self) -> Tensor:
        return self.rows.x

    @property
    def groups(self) -> Groups:
        return self.rows.groups

    def finish(self) -> SummedRows:
        return self

    def combine(self, y: Tensor) -> OwnSums:
        return OwnSums(self.rows.sums(y), self.ranks)


@dataclass(frozen=True, slots=True)
class OwnSums:
    """A `Combining`."""

    sums: Tensor  # [tokens, hidden]
    ranks: Collectives

    def finish(self) -> Tensor:
        return self.ranks.sum(self.sums)


class SlicedDispatcher:
    """A `Dispatcher` of which rank r sends the r-th part of the tokens by another one, which
    `make` returns for parts of at most so many tokens."""

    __slots__ = ("_make", "_ranks")

    def __init__(self, make: Callable[[int], Dispatcher], ranks: Collectives) -> None:
        self._make = make
        self._ranks = ranks

    def start(self, x: Tensor, routed: Routed) -> SentSlice:
        ranks, num_tokens = self._ranks, len(x)
        size = -(-num_tokens // ranks.num_ranks)
        own = slice(ranks.rank * size, min(num_tokens, (ranks.rank + 1) * size))
        routed = Routed(routed.experts[own], routed.weights[own])
        return SentSlice(self._make(size).start(x[own], routed), size, num_tokens, ranks)


@dataclass(frozen=True, slots=True)
class SentSlice:
    """A `Sent`."""

    sent: Sent
    size: int  # tokens of a part, of which the last ones may have fewer
    num_tokens: int  # of all parts
    ranks: Collectives

    def finish(self) -> ArrivedSlice:
        arrived = self.sent.finish()
        return ArrivedSlice(self, arrived, arrived.x, arrived.groups)


@dataclass(frozen=True, slots=True)
class ArrivedSlice:
    """An `Arrived`."""

    sent: SentSlice
    arrived: Arrived
    x: Tensor
    groups: Groups

    def combine(self, y: Tensor) -> CombiningSlice:
        return CombiningSlice(self.sent, self.arrived.combine(y))


@dataclass(frozen=True, slots=True)
class CombiningSlice:
    """A `Combining`."""

    sent: SentSlice
    combining: Combining

    def finish(self) -> Tensor:
        sums = self.combining.finish()
        padded = torch.nn.functional.pad(sums, (0, 0, 0, self.sent.size - len(sums)))
        every = self.sent.ranks.concat(padded.flatten())
        return every.view(-1, sums.shape[1])[: self.sent.num_tokens]
