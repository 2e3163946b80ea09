"""What was sent of one sequence and is not back: its flights in launch order, with their sums.

The sums belong to the list: only these methods write either, so they cannot disagree (check.py
counts them anew in debug mode). Knows nothing of the sequence. Called by launch.py (sent),
commit.py (came back), leave.py and recover.py (dropped).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Flight(msgspec.Struct, gc=False, eq=False):
    """One launched step's part in a sequence. `is_held` from launch until its Sample is given;
    `ends` if the sequence is over when it is back, though nothing was sampled.
    """

    iteration: int
    query_len: int
    num_drafts: int
    samples: bool
    is_held: bool
    ends: bool


class Flights:
    """`query_len`: tokens of all flights; `num_sampling`: flights that sample; `num_drafts`: their
    drafts, so that each flight that samples brings at most 1 + its drafts outputs.

    PERF: read several times per row and step; sums over the list made a third of a host step.
    """

    __slots__ = ("_order", "num_drafts", "num_sampling", "query_len")

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._order: list[Flight] = []
        self.query_len = 0
        self.num_sampling = 0
        self.num_drafts = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._order)

    def __contains__(self, flight: Flight) -> bool:
        return flight in self._order

    def send(self, flight: Flight) -> None:
        self._order.append(flight)
        self.query_len += flight.query_len
        self.num_sampling += flight.samples
        self.num_drafts += flight.num_drafts

    def land(self, flight: Flight) -> None:
        """Flights come back in the order in which they were sent."""
        first = self._order.pop(0)
        assert first is flight
        self.query_len -= flight.query_len
        self.num_sampling -= flight.samples
        self.num_drafts -= flight.num_drafts

    def drop_held(self) -> None:
        kept = [flight for flight in self._order if not flight.is_held]
        self.drop()
        for flight in kept:
            self.send(flight)
