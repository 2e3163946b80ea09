"""The pages that admission keeps free for the rows that run already.

A waiting sequence is admitted when its whole prefill and one more step fit beside what every
running row still takes for its prefill and one more step.
"""

from __future__ import annotations

from operator import sub

from aserve.scheduling.budget import Pages, add_pages, prefill_need, prefill_needs
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


class Reserve:
    """The reserved pages of one call of `admit`.

    PERF: at first it is an upper bound, which counts every decode alike. The exact number is only
    counted where the bound leaves no room.
    """

    __slots__ = ("_is_exact", "_pages", "_promised", "_state")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._is_exact = False
        self._promised: Pages = (0,) * state.cache.num_pools
        per_row = 1 + state.num_pages(state.table.most_step_tokens)
        self._pages: Pages = (len(state.running) * per_row,) * state.cache.num_pools
        rows = state.running_rows
        prefills = rows[state.table.remaining[rows] > state.spec.decode.root_len]
        self._pages = add_pages(self._pages, prefill_needs(state, prefills))

    def has_room_beside(self, sequence: Sequence) -> bool:
        """Returns whether the prefill of the sequence, whose prefix was opened, fits beside the
        others.
        """
        return self.lacking_beside(sequence) <= 0

    def lacking_beside(self, sequence: Sequence) -> int:
        """Pages that must become free in some group of its rank until it fits; 0 or less if it
        does.
        """
        need = prefill_need(self._state, sequence)
        lacking = self._lacking(need, sequence.rank)
        if lacking <= 0 or self._is_exact:
            return lacking
        self._count()
        return self._lacking(need, sequence.rank)

    def promise(self, sequence: Sequence) -> None:
        """Counts a sequence that will be admitted, and does not run yet."""
        need = prefill_need(self._state, sequence)
        self._promised = add_pages(self._promised, need)
        self._pages = add_pages(self._pages, need)

    def add(self, sequence: Sequence) -> None:
        """Counts a sequence that runs now, or is about to."""
        self._pages = add_pages(self._pages, prefill_need(self._state, sequence))

    def num_reserved(self, row: Sequence) -> int:
        """Pages that are kept free for this running row, as far as rows were counted one by one."""
        first = self._state.cache.pools_of(row.rank)[0]
        return prefill_need(self._state, row)[first] if self._is_exact else 0

    def remove(self, row: Sequence) -> None:
        """Stops counting a row that is about to be retracted, and still has its pages."""
        if self._is_exact:
            need = prefill_need(self._state, row)
            self._pages = tuple(map(sub, self._pages, need))

    def _lacking(self, need: Pages, rank: int) -> int:
        cache, total = self._state.cache, add_pages(self._pages, need)
        return max(total[pool] - cache.available(pool) for pool in cache.pools_of(rank))

    def _count(self) -> None:
        self._is_exact = True
        running = prefill_needs(self._state, self._state.running_rows)
        self._pages = add_pages(self._promised, running)
