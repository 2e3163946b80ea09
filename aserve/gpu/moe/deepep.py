"""Expert parallelism in the two ways of DeepEP: each rank has some of the experts, and rows travel.

Normal mode, for many tokens: a token goes once to each rank that has one of its experts, and each
rank returns the weighted sum over its own experts. Shapes depend on the routing, so the host waits
for it. Low-latency mode, for few tokens: a row goes to each expert, all shapes are fixed by
`max_tokens`, and nothing waits, so a forward may be captured as a graph.

    normal       x [received tokens, hidden], experts local or -1, weights
    low latency  x [local experts, ranks * max_tokens, hidden], of which the first rows are filled

Rank r has the experts from r * n to (r + 1) * n. Source: https://github.com/deepseek-ai/DeepEP
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.layers.grouped_linear import Groups
from aserve.gpu.moe.dispatch import OwnRows, own_rows, sort_by_expert, weighted_sums
from aserve.gpu.moe.routing import Routed


class Exchange(Protocol):
    """An all-to-all between ranks, in two halves. Every rank enters every exchange, in the same
    order."""

    @property
    def num_ranks(self) -> int: ...

    def waiting(self) -> AbstractContextManager[None]:
        """Returns a context for a wait for the device, which may be waiting for another rank."""

    def start(self, parts: Sequence[tuple[Tensor, ...]]) -> object:
        """`parts` has the tensors for each rank. They must not change until `finish` returns."""

    def finish(self, posted: object) -> Sequence[tuple[Tensor, ...]]:
        """Returns the tensors from each rank, in the order of the ranks."""


class NormalDispatcher:
    """DeepEP's normal mode, as a `Dispatcher`."""

    __slots__ = ("_exchange", "_num_own")

    def __init__(self, num_experts: int, exchange: Exchange) -> None:
        self._exchange = exchange
        self._num_own = num_experts // exchange.num_ranks

    def start(self, x: Tensor, routed: Routed) -> SentTokens:
        owners = routed.experts // self._num_own
        tokens, parts = [], []
        for rank in range(self._exchange.num_ranks):
            is_own = owners == rank
            with self._exchange.waiting():
                chosen = is_own.any(dim=1).nonzero().flatten()
            local = torch.where(is_own, routed.experts - rank * self._num_own, -1)
            tokens.append(chosen)
            parts.append((x[chosen], local[chosen], routed.weights[chosen]))
        sent = self._exchange.start(parts)
        return SentTokens(self._exchange, sent, self._num_own, tuple(tokens), x)


@dataclass(frozen=True, slots=True)
class SentTokens:
    """A `Sent`."""

    exchange: Exchange
    posted: object
    num_own: int  # experts of this rank
    tokens: tuple[Tensor, ...]  # of each rank: the tokens that went there
    like: Tensor  # [tokens, hidden], of which only the shape and the dtype are used

    def finish(self) -> ArrivedTokens:
        received = self.exchange.finish(self.posted)
        rows = own_rows(*map(torch.cat, zip(*received, strict=True)), num_own=self.num_own)
        return ArrivedTokens(self, rows, tuple(len(part[0]) for part in received))


@dataclass(frozen=True, slots=True)
class ArrivedTokens:
    """An `Arrived`."""

    sent: SentTokens
    rows: OwnRows
    sizes: tuple[int, ...]  # received tokens of each rank

    @property
    def x(self) -> Tensor:
        return self.rows.x

    @property
    def groups(self) -> Groups:
        return self.rows.groups

    def combine(self, y: Tensor) -> TokenSums:
        parts = [(part,) for part in self.rows.sums(y).split(self.sizes)]
        return TokenSums(self.sent, self.sent.exchange.start(parts))


@dataclass(frozen=True, slots=True)
class TokenSums:
    """A `Combining`: each rank's sums are added in the order of the ranks."""

    sent: SentTokens
    posted: object

    def finish(self) -> Tensor:
        sums = torch.zeros_like(self.sent.like)
        received = self.sent.exchange.finish(self.posted)
        for tokens, (part,) in zip(self.sent.tokens, received, strict=True):
            sums[tokens] += part
        return sums


class LowLatencyDispatcher:
    """DeepEP's low-latency mode, as a `Dispatcher`. Each rank has at most `max_tokens` tokens."""

    __slots__ = ("_exchange", "_max_tokens", "_num_experts")

    def __init__(self, num_experts: int, exchange: Exchange, *, max_tokens: int) -> None:
        self._exchange = exchange
        self._num_experts = num_experts
        self._max_tokens = max_tokens

    def start(self, x: Tensor, routed: Routed) -> SentRows:
        limit = self._max_tokens
        if len(x) > limit:
            raise BugError(
                f"{len(x)} tokens in a low-latency dispatch of at most {limit} per rank; "
                "larger batches take the normal mode"
            )
        rows = sort_by_expert(routed.experts, self._num_experts)
        experts = routed.experts.flatten()[rows.order]
        starts = torch.nn.functional.pad(rows.groups.starts, (0, 1))
        places = torch.arange(len(experts), device=x.device) - starts[experts]
        # The last slot takes what goes to no expert.
        no_slot = self._num_experts * limit
        slots = torch.empty_like(rows.order)
        slots[rows.order] = (experts * limit + places).clamp(max=no_slot)
        packed = x.new_zeros(no_slot + 1, x.shape[1])
        packed[slots] = x.repeat_interleave(routed.experts.shape[1], dim=0)
        tensors = (rows.groups.ends - rows.groups.starts, packed[:-1])
        chunks = (tensor.chunk(self._exchange.num_ranks) for tensor in tensors)
        posted = self._exchange.start([*zip(*chunks, strict=True)])
        slots = slots.view(routed.experts.shape)
        return SentRows(self._exchange, posted, limit, slots, routed.weights)


@dataclass(frozen=True, slots=True)
class SentRows:
    """A `Sent`."""

    exchange: Exchange
    posted: object
    max_tokens: int
    slots: Tensor  # int64 [tokens, k]: the rows' places in [experts, max_tokens], flat
    weights: Tensor  # [tokens, k]

    def finish(self) -> ArrivedRows:
        """An expert's rows of one rank follow those of the ranks before."""
        by_rank, parts = zip(*self.exchange.finish(self.posted), strict=True)
        x = torch.cat(parts)
        counts = torch.stack(by_rank)  # [ranks, local experts]
        num_ranks, num_own = counts.shape
        starts = torch.arange(num_own, device=x.device) * (num_ranks * self.max_tokens)
        places = torch.arange(self.max_tokens, device=x.device)
        rows = (starts + counts.cumsum(0) - counts)[:, :, None] + places
        is_filled = places < counts[:, :, None]
        packed = x.new_empty(len(x) + 1, x.shape[1])  # the last row takes what is not filled
        packed[torch.where(is_filled, rows, len(x)).flatten()] = x
        groups = Groups(starts.int(), (starts + counts.sum(0)).int())
        return ArrivedRows(self, packed[:-1], groups, torch.where(is_filled, rows, 0))


@dataclass(frozen=True, slots=True)
class ArrivedRows:
    """An `Arrived`."""

    sent: SentRows
    x: Tensor
    groups: Groups
    rows: Tensor  # int64 [ranks, local experts, max_tokens]: places in x of what each rank sent

    def combine(self, y: Tensor) -> RowSums:
        parts = [(y[rows.flatten()],) for rows in self.rows]
        return RowSums(self.sent, self.sent.exchange.start(parts))


@dataclass(frozen=True, slots=True)
class RowSums:
    """A `Combining`."""

    sent: SentRows
    posted: object

    def finish(self) -> Tensor:
        received = self.sent.exchange.finish(self.posted)
        by_expert = torch.cat([part for (part,) in received])
        by_expert = torch.nn.functional.pad(by_expert, (0, 0, 0, 1))  # of places without an expert
        return weighted_sums(by_expert[self.sent.slots], self.sent.weights)
