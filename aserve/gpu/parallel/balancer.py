"""Redundant experts, which move between ranks with the measured load (EPLB).

All ranks route all tokens, so each of them counts the same tokens per expert, computes the same
placement, and moves a layer's weights between the same two forwards; nobody tells anybody. The
copies of an expert take its tokens in turns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.moe.dispatch import Dispatcher, Sent
from aserve.gpu.moe.placement import balanced, balancedness
from aserve.gpu.moe.routing import Routed
from aserve.gpu.parallel.exchange import GroupExchange
from aserve.gpu.parallel.source import PlacedExperts

logger = logging.getLogger(__name__)


class Turns:
    """The slots of each expert, which its tokens take in turns."""

    __slots__ = ("_num_copies", "_slots")

    def __init__(self, slots: Sequence[int], num_experts: int) -> None:
        """The number of experts stands for one that is not there, and that of slots too."""
        places: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(slots):
            places[expert].append(slot)
        places.append([len(slots)])
        most = max(map(len, places))
        self._num_copies = torch.tensor([len(own) for own in places])
        self._slots = torch.tensor([own + own[:1] * (most - len(own)) for own in places])

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
        rank = self.exchange.place.rank
        plan = [_missing(held[other], wanted[other]) for other in range(len(held))]
        owner = {expert: slot // len(held[0]) for slot, expert in reversed([*enumerate(old)])}
        stacks = [layer.stack for layer in self.layers]

        def sent(receiver: int, sender: int) -> list[int]:
            return [expert for expert in plan[receiver] if owner[expert] == sender]

        def rows(experts: Sequence[int]) -> list[int]:
            return [held[rank].index(expert) for expert in experts]

        parts = [
            tuple(stack[rows(sent(other, rank))] for stack in stacks) for other in range(len(held))
        ]
        received = self.exchange.finish(self.exchange.start(parts))
        come = [expert for sender in range(len(held)) for expert in sent(rank, sender)]
        there = [*held[rank], *come]
        places = [there.index(expert) for expert in wanted[rank]]
        for number, layer in enumerate(self.layers):
            every = torch.cat([layer.stack, *(part[number] for part in received)])
            layer.replace(every[places])

    def _parts(self, slots: Sequence[int]) -> list[list[int]]:
        num_own = len(slots) // self.exchange.num_ranks
        return [list(slots[i : i + num_own]) for i in range(0, len(slots), num_own)]


def _missing(held: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Returns the experts that have to come, each once."""
    return sorted(set(wanted) - set(held))


class BalancedDispatcher:
    """A `Dispatcher` before that of the slots. NOTE: weights move when a forward starts, so no
    other forward of this layer may be between its halves then."""

    __slots__ = (
        *("_inner", "_interval", "_loads", "_moves", "_num_forwards", "_turns"),
        "slots",
    )

    def __init__(
        self,
        inner: Dispatcher,
        slots: Sequence[int],
        *,
        num_experts: int,
        interval: int,
        moves: ExpertMoves,
    ) -> None:
        self.slots = tuple(slots)  # the expert in each slot of all ranks
        self._inner = inner
        self._interval = interval  # forwards between two placements
        self._moves = moves
        self._num_forwards = 0
        self._loads = torch.zeros(num_experts + 1, dtype=torch.int64)
        self._turns = Turns(slots, num_experts)

    def start(self, x: Tensor, routed: Routed) -> Sent:
        if self._num_forwards == self._interval:
            self._rebalance()
        self._num_forwards += 1
        # Data-parallel ranks pad their tokens with zeros, which no token's normed input is.
        experts = routed.experts[x.any(dim=1)]
        self._loads += torch.bincount(experts.flatten(), minlength=len(self._loads))
        return self._inner.start(x, Routed(self._turns(routed.experts), routed.weights))

    def _rebalance(self) -> None:
        """Experts stay where they are unless the new placement is better."""
        loads = [int(load) for load in self._loads[:-1]]
        ranks = self._moves.exchange.num_ranks
        slots = balanced(loads, num_slots=len(self.slots), num_ranks=ranks)
        before, after = (balancedness(loads, each, num_ranks=ranks) for each in (self.slots, slots))
        logger.info("experts: balancedness=%.3f after=%.3f", before, max(before, after))
        self._num_forwards = 0
        self._loads.zero_()
        if after > before:
            self._moves.run(self.slots, slots)
            self.slots = slots
            self._turns = Turns(slots, len(loads))
