"""The pages that admission keeps free for the rows that run already.

A waiting sequence is admitted when its whole prefill and one more step fit beside what every
running row still takes for its prefill and one more step.
"""

from __future__ import annotations

from aserve.scheduling.budget import Pages, add_pages, has_room, prefill_need
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


class Reserve:
    """The reserved pages of one call of `admit`.

    PERF: at first it is an upper bound, which counts every decode alike. The exact number, 3 us for
    each running row, is only counted where the bound leaves no room.
    """

    __slots__ = ("_is_exact", "_pages", "_state")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._is_exact = False
        per_row = 1 + state.num_pages(state.spec.decode.max_tokens_per_step)
        self._pages: Pages = (len(state.running) * per_row,) * len(state.spec.groups)
        for row in state.running.values():
            if row.remaining > 1:
                self.add(row)

    def has_room_beside(self, sequence: Sequence) -> bool:
        """Whether the prefill of the sequence, whose prefix was opened, fits beside the others."""
        need = prefill_need(self._state, sequence)
        if has_room(self._state, add_pages(self._pages, need)):
            return True
        if self._is_exact:
            return False
        self._count()
        return has_room(self._state, add_pages(self._pages, need))

    def add(self, sequence: Sequence) -> None:
        self._pages = add_pages(self._pages, prefill_need(self._state, sequence))

    def _count(self) -> None:
        self._is_exact = True
        self._pages = (0,) * len(self._state.spec.groups)
        for row in self._state.running.values():
            self.add(row)
