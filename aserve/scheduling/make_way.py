"""Rows are retracted for waiting sequences of clients that have less than their share.

As long as nobody else waits, one client may run on all rows and hold all pages. Otherwise:

- Rows. A client's share of rows is max_rows / active clients. When a sequence waits whose client is
  below that, and no row is free, a row of the client that is furthest above it is retracted.
- Pages. When a waiting sequence does not fit into the pool, rows of the clients with the most pages
  are retracted, if each of these clients keeps at least as many pages as the client of the waiting
  sequence then has.

Either rule only takes from a client that has more afterwards than the one it gives to. Rows grow
and come back, so that clients could still retract each other in turns, each computing again what it
lost: a sequence therefore causes a bounded number of retractions in its whole life. What a
retracted row computed mostly stays in the prefix cache. Nobody is retracted for a sequence that
would not be admitted: one that waits for a leader's pages, for a row of those with slow masks, for
more pages than retraction can free, or for tokens of a step that the prefills before it take.

With data-parallel ranks, rows and pages are freed on the rank where the waiting sequence finds a
place by that.

WHY: no rows are kept free for newcomers. Kept rows would cost throughput all the time, and would
not suffice for the second newcomer.
"""

from __future__ import annotations

from collections import Counter

from aserve.scheduling.budget import has_ample_room
from aserve.scheduling.clients import Client
from aserve.scheduling.finish import retract, retraction_order
from aserve.scheduling.grammar_rows import has_slow_room
from aserve.scheduling.prefill_line import PrefillLine, next_lines
from aserve.scheduling.prefixes import open_with_room, undo_open
from aserve.scheduling.request import Sequence
from aserve.scheduling.reserve import Reserve
from aserve.scheduling.state import SchedulerState

MAX_HEADS = 8  # waiting sequences that one launch looks at
MAX_RETRACTIONS = 16  # of one launch
MAX_RETRACTIONS_FOR = 16  # rows, for one sequence in its whole life


def make_way(state: SchedulerState) -> set[Sequence]:
    """Frees rows and pages for the sequences that wait first in order, as the module says. Returns
    those to which their clients have a right now, whatever the forecast of pages says.
    """
    if state.clients.num_active < 2 or state.is_recovering or not state.waiting:
        return set()
    way = _Way(state)
    looked_at: list[Sequence] = []
    while len(looked_at) < MAX_HEADS and (sequence := state.waiting.pop()) is not None:
        looked_at.append(sequence)
        if not has_slow_room(state, sequence) or way.has_plenty():
            continue
        if not way.may_have_row(sequence.client):
            break
        has_place = open_with_room(state, sequence, range(state.spec.dp_size), way.make)
        if has_place is None:
            looked_at.pop()  # it waits for a leader, outside the queue
            continue
        if not has_place:
            break
        undo_open(state, sequence)
    for sequence in looked_at:
        state.waiting.add(sequence)
    return way.owed


class _Way:
    """The accounts of one call of `make_way`: what each client has, and what was promised."""

    __slots__ = (
        "_has_ample_room",
        "_lines",
        "_num_free",
        "_num_promised",
        "_num_retracted",
        "_pages",
        "_reserve",
        "_share",
        "_state",
        "owed",
    )

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._share = max(1, state.spec.max_rows // state.clients.num_active)
        self._num_free = [state.rows.num_free_of(rank) for rank in range(state.spec.dp_size)]
        self._num_promised: Counter[Client] = Counter()
        self._num_retracted = 0
        self._has_ample_room = has_ample_room(state)
        self._pages: Counter[Client] = Counter()
        self._reserve: Reserve | None = None
        self._lines: list[PrefillLine] = []  # a retracted prefill stays in its line
        self.owed: set[Sequence] = set()

    def has_plenty(self) -> bool:
        """Returns whether the next sequence has a row and room without a closer look. It gets the
        row.
        """
        has_plenty = any(self._num_free) and self._has_ample_room and not self._state.caution
        if has_plenty:
            self._num_free[self._num_free.index(max(self._num_free))] -= 1
        return has_plenty

    def may_have_row(self, client: Client) -> bool:
        return any(self._num_free) or client.num_rows + self._num_promised[client] < self._share

    def make(self, sequence: Sequence) -> bool:
        """Returns whether there is a row and room for the sequence, whose prefix was opened. Nobody
        is retracted where that would not suffice.
        """
        rows, rank = self._rows_for(sequence), sequence.rank
        # NOTE: the last running row is never retracted: it could not come back before the other.
        if rows is None or (rows and len(rows) >= self._state.rows.num_taken_of(rank)):
            return False
        self._lines = self._lines or next_lines(self._state)
        if rows and not self._lines[rank].has_tokens_for(sequence):
            return False
        # NOTE: all or none. What some rows free would be gone until others can follow.
        if len(rows) > MAX_RETRACTIONS - self._num_retracted:
            return False
        for row in rows:
            sequence.num_retracted_for += 1
            self._retract(row)
        reserve = self._accounts()
        if not self._num_free[rank] or reserve.lacking_beside(sequence) > 0:
            return False
        self._num_free[rank] -= 1
        self._num_promised[sequence.client] += 1
        self._lines[rank].add(sequence)
        reserve.promise(sequence)
        self._pages[sequence.client] += self._state.num_pages(sequence.tokens.num + 1)
        if self._pages[sequence.client] <= max(self._pages.values()):
            self.owed.add(sequence)
        return True

    def _rows_for(self, sequence: Sequence) -> list[Sequence] | None:
        """Returns the rows to retract for this sequence; None if it cannot be admitted by that, or
        only by more than it may cause.
        """
        reserve = self._accounts()
        num_lacking = reserve.lacking_beside(sequence)
        has_row = self._num_free[sequence.rank] > 0
        if has_row and num_lacking <= 0:
            return []
        if sequence.num_retracted_for >= MAX_RETRACTIONS_FOR:
            return None
        rows: list[Sequence] = []
        if not has_row:
            row = self._row_above_share(sequence)
            if row is None:
                return None
            rows.append(row)
            num_lacking -= _num_pages(row) + reserve.num_reserved(row)
        if num_lacking > 0:
            more = self._rows_to_retract(sequence, num_lacking, beside=rows)
            if not more:
                return None
            rows += more
        num_allowed = MAX_RETRACTIONS_FOR - sequence.num_retracted_for
        return rows if len(rows) <= num_allowed else None

    def _row_above_share(self, sequence: Sequence) -> Sequence | None:
        rows = [
            row
            for row in self._state.retractable()
            if row.rank == sequence.rank
            and row.client.num_rows > self._share
            and row.priority >= sequence.priority
        ]
        return max(rows, key=lambda row: (row.client.num_rows, retraction_order(row)), default=None)

    def _accounts(self) -> Reserve:
        if self._reserve is None:
            self._reserve = Reserve(self._state)
            for row in self._state.running.values():
                self._pages[row.client] += _num_pages(row)
        return self._reserve

    def _rows_to_retract(
        self, sequence: Sequence, num_lacking: int, *, beside: list[Sequence]
    ) -> list[Sequence]:
        """Rows that together free so many pages; none if the rules do not allow enough. Rows of one
        client are taken in the order of retraction.
        """
        num_after = self._pages[sequence.client] + self._state.num_pages(sequence.tokens.num + 1)
        left = Counter(self._pages)
        for row in beside:
            left[row.client] -= _num_pages(row)
        chosen: list[Sequence] = []
        done = {sequence.client}
        rows = [
            row
            for row in self._state.retractable()
            if row.rank == sequence.rank and row.priority >= sequence.priority and row not in beside
        ]
        rows.sort(key=lambda row: (self._pages[row.client], retraction_order(row)), reverse=True)
        for row in rows:
            if left[row.client] - _num_pages(row) < num_after:
                done.add(row.client)
            if row.client in done:
                continue
            left[row.client] -= _num_pages(row)
            chosen.append(row)
            num_lacking -= _num_pages(row)
            if num_lacking <= 0:
                return chosen
        return []

    def _retract(self, row: Sequence) -> None:
        self._num_retracted += 1
        self._num_free[row.rank] += 1
        if self._reserve is not None:
            self._pages[row.client] -= _num_pages(row)
            self._reserve.remove(row)
        retract(self._state, row)


def _num_pages(row: Sequence) -> int:
    assert row.allocation is not None
    return row.allocation.num_pages
