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
    Sent,
    sort_by_expert,
    weighted_sums,
)
from aserve.gpu.moe.routing import Routed
from aserve.gpu.parallel.collectives import Collectives


class SummedDispatcher:
    """The `Dispatcher` that sends no rows. Rank r has the experts from r * n to (r + 1) * n."""

    __slots__ = ("_num_own", "_ranks")

    def __init__(self, num_experts: int, ranks: Collectives) -> None:
        self._ranks = ranks
        self._num_own = num_experts // ranks.num_ranks

    def start(self, x: Tensor, routed: Routed) -> OwnRows:
        local = routed.experts - self._ranks.rank * self._num_own
        is_own = (local >= 0) & (local < self._num_own)
        rows = sort_by_expert(torch.where(is_own, local, self._num_own), self._num_own)
        tokens = rows.order // routed.experts.shape[1]
        return OwnRows(
            x[tokens],
            rows.groups,
            order=rows.order,
            is_own=is_own,
            routed=routed,
            ranks=self._ranks,
        )


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Both `Sent` and `Arrived`. Rows of other ranks' experts come last, and are in no group."""

    x: Tensor
    groups: Groups
    order: Tensor  # of each row, its place in [tokens, k], flat
    is_own: Tensor  # bool [tokens, k]
    routed: Routed
    ranks: Collectives

    def finish(self) -> OwnRows:
        return self

    def combine(self, y: Tensor) -> OwnSums:
        unsorted = torch.empty_like(y)
        unsorted[self.order] = y
        by_expert = unsorted.view(*self.is_own.shape, y.shape[1])
        own = torch.where(self.is_own[:, :, None], by_expert, 0.0)
        return OwnSums(weighted_sums(own, self.routed.weights), self.ranks)


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
