"""Redundant experts, which move between ranks with the measured load (EPLB).

All ranks route all tokens, so each of them counts the same tokens per expert, computes the same
placement, and moves a layer's weights between the same two forwards; nobody tells anybody. The
copies of an expert take its tokens in turns.

A forward of a layer is counted when its last half has ended. WHY: a data-parallel rank whose step
fails in an MLP computes that one again (`JointForward`). Tokens that it counted twice would move
its experts before those of the others, and elsewhere.

Weights, counts and the table of slots stay where they are on the device, so that a captured graph
counts, and reads what has moved. Its replays are counted by the host (`ExpertRanks.before_replay`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aserve.gpu.layers.grouped_linear import Groups
from aserve.gpu.moe.dispatch import Arrived, Combining, Dispatcher, Sent
from aserve.gpu.moe.placement import balanced, balancedness
from aserve.gpu.moe.routing import Routed
from aserve.gpu.parallel.exchange import GroupExchange
from aserve.gpu.parallel.source import PlacedExperts

logger = logging.getLogger(__name__)


class Turns:
    """The slots of each expert, which its tokens take in turns."""

    __slots__ = ("_num_copies", "_slots")

    def __init__(self, slots: Sequence[int], num_experts: int, device: torch.device) -> None:
        """The number of experts stands for one that is not there, and that of slots too."""
        shape = num_experts + 1, len(slots) - num_experts + 1
        self._num_copies = torch.empty(shape[0], dtype=torch.int64, device=device)
        self._slots = torch.empty(shape, dtype=torch.int64, device=device)
        self.place(slots)

    def place(self, slots: Sequence[int]) -> None:
        num_experts, most = len(self._slots) - 1, self._slots.shape[1]
        places: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(slots):
            places[expert].append(slot)
        places.append([len(slots)])
        self._num_copies.copy_(torch.tensor([len(own) for own in places]))
        self._slots.copy_(torch.tensor([own + own[:1] * (most - len(own)) for own in places]))

    def __call__(self, experts: Tensor) -> Tensor:
        """experts int64 [tokens, k] -> slots int64 [tokens, k]."""
        tokens = torch.arange(len(experts), device=experts.device)[:, None]
        return self._slots[experts, tokens % self._num_copies[experts]]


@dataclass(frozen=True, slots=True)
class ExpertMoves:
    """Moves the weights of one layer's experts between ranks."""

    exchange: GroupExchange  # of shapes that are not fixed
    layers: tuple[PlacedExperts, ...]

    def run(self, old: Sequence[int], new: Sequence[int]) -> None:
        """`old` and `new` have the expert in each slot. All ranks call this."""
        by_rank = [self._parts(slots) for slots in (old, new)]
        held, wanted = by_rank
        rank = self.exchange.ranks.rank
        plan = [_missing(held[other], wanted[other]) for other in range(len(held))]
        owner = {expert: slot // len(held[0]) for slot, expert in reversed([*enumerate(old)])}
        stacks = [layer.stack for layer in self.layers]

        def sent(receiver: int, sender: int) -> list[int]:
            return [expert for expert in plan[receiver] if owner[expert] == sender]

        def rows(experts: Sequence[int]) -> list[int]:
            return [held[rank].index(expert) for expert in experts]

        parts = [
            tuple(_rows(stack, rows(sent(other, rank))) for stack in stacks)
            for other in range(len(held))
        ]
        received = self.exchange.finish(self.exchange.start(parts))
        come = [expert for sender in range(len(held)) for expert in sent(rank, sender)]
        there = [*held[rank], *come]
        places = [there.index(expert) for expert in wanted[rank]]
        for number, layer in enumerate(self.layers):
            every = torch.cat([layer.stack, *(part[number] for part in received)])
            layer.replace(_rows(every, places))

    def _parts(self, slots: Sequence[int]) -> list[list[int]]:
        num_own = len(slots) // self.exchange.num_ranks
        return [list(slots[i : i + num_own]) for i in range(0, len(slots), num_own)]


def _rows(stack: Tensor, places: Sequence[int]) -> Tensor:
    """`stack[places]`, without indices that would be copied to the device."""
    return torch.cat([stack[:0], *(stack[place : place + 1] for place in places)])


def _missing(held: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Returns the experts that have to come, each once."""
    return sorted(set(wanted) - set(held))


class BalancedDispatcher:
    """A `Dispatcher` before that of the slots. NOTE: weights move when a forward starts, so no
    other forward of this layer may be between its halves then."""

    __slots__ = (
        *("_initial_slots", "_inner", "_interval", "_loads", "_moves", "_num_forwards", "_turns"),
        *("counts_forwards", "slots"),
    )

    def __init__(
        self,
        inner: Dispatcher,
        slots: Sequence[int],
        *,
        num_experts: int,
        interval: int,
        moves: ExpertMoves,
        device: torch.device,
    ) -> None:
        self._initial_slots = tuple(slots)
        self.slots = self._initial_slots  # the expert in each slot of all ranks
        self._inner = inner
        self._interval = interval  # forwards between two placements
        self._moves = moves
        self._num_forwards = 0
        self._loads = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self._turns = Turns(slots, num_experts, device)
        self.counts_forwards = True  # False while a graph is captured

    def count_replay(self) -> None:
        """A graph of a forward is about to be replayed."""
        self._begin_forward()
        self._num_forwards += 1

    def start(self, x: Tensor, routed: Routed) -> Sent:
        if self.counts_forwards:
            self._begin_forward()
        # Data-parallel ranks pad their tokens with zeros, which no token's normed input is.
        is_token = x.any(dim=1)[:, None].expand_as(routed.experts)
        sent = self._inner.start(x, Routed(self._turns(routed.experts), routed.weights))
        return _CountedSent(sent, partial(self._count, routed.experts, is_token))

    def _begin_forward(self) -> None:
        """After `interval` forwards, experts move before the next one."""
        if self._num_forwards == self._interval:
            self._rebalance()

    def _count(self, experts: Tensor, is_token: Tensor) -> None:
        """Counts a forward: its routed experts [tokens, k], but for those of padding, where
        `is_token` [tokens, k] is False."""
        self._loads.scatter_add_(0, experts.flatten(), is_token.flatten().long())
        if self.counts_forwards:
            self._num_forwards += 1

    def restart(self) -> None:
        """The ranks have new weights, which are where those of the start were."""
        self._num_forwards = 0
        self._loads.zero_()
        self._place(self._initial_slots)

    def _rebalance(self) -> None:
        """Experts stay where they are unless the new placement is better."""
        with self._moves.exchange.waiting():
            counted = torch.empty(len(self._loads), dtype=torch.int64).copy_(self._loads)
        loads = [int(load) for load in counted[:-1]]
        ranks = self._moves.exchange.num_ranks
        slots = balanced(loads, num_slots=len(self.slots), num_ranks=ranks)
        before, after = (balancedness(loads, each, num_ranks=ranks) for each in (self.slots, slots))
        logger.info("experts: balancedness=%.3f after=%.3f", before, max(before, after))
        self._num_forwards = 0
        self._loads.zero_()
        if after > before:
            self._moves.run(self.slots, slots)
            self._place(slots)

    def _place(self, slots: tuple[int, ...]) -> None:
        self.slots = slots
        self._turns.place(slots)


@dataclass(frozen=True, slots=True)
class _CountedSent:
    """A dispatch that counts a forward when its last half has ended, after the sums."""

    inner: Sent
    count: Callable[[], None]

    def finish(self) -> _CountedRows:
        return _CountedRows(self.inner.finish(), self.count)


@dataclass(frozen=True, slots=True)
class _CountedRows:
    """The rows that have arrived by such a dispatch."""

    inner: Arrived
    count: Callable[[], None]

    @property
    def x(self) -> Tensor:
        return self.inner.x

    @property
    def groups(self) -> Groups:
        return self.inner.groups

    def combine(self, y: Tensor) -> _CountedSums:
        return _CountedSums(self.inner.combine(y), self.count)


@dataclass(frozen=True, slots=True)
class _CountedSums:
    """The sums of such a dispatch, which counts when they are there."""

    inner: Combining
    count: Callable[[], None]

    def finish(self) -> Tensor:
        sums = self.inner.finish()
        self.count()
        return sums
