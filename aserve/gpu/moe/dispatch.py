"""Dispatch sends each token to its experts, and combine adds up what they return.

Both have two halves, so that something else can run while rows travel between ranks: the first
posts what this rank sends, and `finish` waits for what it receives. DeepEP has the same four calls
(https://github.com/deepseek-ai/DeepEP). All that an exchange keeps is in the value that the half
before has returned, so one dispatcher serves several forwards at once:

    sent = dispatcher.start(x, routed)
    arrived = sent.finish()
    combining = arrived.combine(experts(arrived.x, arrived.groups))
    y = combining.finish()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aserve.gpu.layers.grouped_linear import Groups
from aserve.gpu.moe.routing import Routed


class Dispatcher(Protocol):
    """Moves rows between a layer's tokens and its experts. Every rank makes all four calls in each
    layer, even without tokens."""

    def start(self, x: Tensor, routed: Routed) -> Sent:
        """x [tokens, hidden]."""


class Sent(Protocol):
    def finish(self) -> Arrived: ...


class Arrived(Protocol):
    """The rows that this rank's experts have to compute."""

    @property
    def x(self) -> Tensor:
        """[rows, hidden]."""

    @property
    def groups(self) -> Groups:
        """The rows of each of this rank's experts."""

    def combine(self, y: Tensor) -> Combining:
        """y [rows, hidden], the experts' results."""


class Combining(Protocol):
    def finish(self) -> Tensor:
        """Returns the weighted sums, [tokens, hidden] of the dtype of x."""


class SortedRows(NamedTuple):
    """Copies of tokens, one for each of their experts, in the order of the experts."""

    order: Tensor  # int64 [tokens * k]: of each sorted row, its place in [tokens, k], flat
    groups: Groups


def sort_by_expert(experts: Tensor, num_experts: int) -> SortedRows:
    """experts int64 [tokens, k]. The bounds stay on the device. Experts from `num_experts` on
    belong to no group; their rows come last."""
    by_expert, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=experts.device)
    starts = torch.searchsorted(by_expert, numbers, out_int32=True)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    return SortedRows(order, Groups(starts, ends))


def weighted_sums(y: Tensor, weights: Tensor) -> Tensor:
    """y [tokens, k, hidden], weights [tokens, k] -> [tokens, hidden]. The products of a token are
    added in the order of its experts, in the dtype of the weights, so the sum is the same in every
    batch."""
    total = y[:, 0].to(weights.dtype) * weights[:, :1]
    for k in range(1, y.shape[1]):
        total = total + y[:, k] * weights[:, k : k + 1]
    return total.to(y.dtype)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows that a rank's own experts compute for some tokens, sorted by expert. Those of other
    ranks' experts come last, and are in no group."""

    x: Tensor  # [tokens * k, hidden]
    groups: Groups
    order: Tensor  # of each row, its place in [tokens, k], flat
    is_own: Tensor  # bool [tokens, k]: whether that expert is here
    weights: Tensor  # [tokens, k]

    def sums(self, y: Tensor) -> Tensor:
        """y [tokens * k, hidden], the experts' results -> [tokens, hidden], each token's weighted
        sum over the experts that are here."""
        unsorted = torch.empty_like(y)
        unsorted[self.order] = y
        by_expert = unsorted.view(*self.is_own.shape, y.shape[1])
        own = torch.where(self.is_own[:, :, None], by_expert, 0.0)
        return weighted_sums(own, self.weights)


def own_rows(x: Tensor, experts: Tensor, weights: Tensor, *, num_own: int) -> OwnRows:
    """x [tokens, hidden]; experts int64 [tokens, k], from 0 to `num_own` - 1 if they are here."""
    is_own = (experts >= 0) & (experts < num_own)
    rows = sort_by_expert(torch.where(is_own, experts, num_own), num_own)
    tokens = rows.order // experts.shape[1]
    return OwnRows(x[tokens], rows.groups, rows.order, is_own, weights)


class LocalDispatcher:
    """The `Dispatcher` of a rank that has all experts: it sorts rows by expert."""

    __slots__ = ("_num_experts",)

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def start(self, x: Tensor, routed: Routed) -> LocalRows:
        rows = sort_by_expert(routed.experts, self._num_experts)
        tokens = rows.order // routed.experts.shape[1]
        return LocalRows(x[tokens], rows.groups, rows.order, routed.weights)


@dataclass(frozen=True, slots=True)
class LocalRows:
    """Both `Sent` and `Arrived`."""

    x: Tensor
    groups: Groups
    order: Tensor
    weights: Tensor

    def finish(self) -> LocalRows:
        return self

    def combine(self, y: Tensor) -> LocalSums:
        unsorted = torch.empty_like(y)
        unsorted[self.order] = y
        return LocalSums(unsorted.view(*self.weights.shape, y.shape[1]), self.weights)


@dataclass(frozen=True, slots=True)
class LocalSums:
    """A `Combining`."""

    y: Tensor  # [tokens, k, hidden]
    weights: Tensor

    def finish(self) -> Tensor:
        return weighted_sums(self.y, self.weights)
