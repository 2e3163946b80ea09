"""One tick of the scheduler: how much it may do, and which events come in it.

A tick costs about 3 us for every running row, and 20 to 40 us for every sequence that is received,
admitted or finished in it. So the fewer rows run, the more of the others a tick may take; the rest
waits for the next tick. What remains where many rows run is enough for a steady load in which each
sequence runs for at least 40 steps.
"""

from __future__ import annotations

from collections import deque

from aserve.messages.executor import EngineSpec, SchedulerEvent
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.scheduling.state import SchedulerState

MOST = 10  # sequences, where no row runs
LEAST = 6  # sequences that are admitted and finished, however many rows run
LEAST_RECEIVED = 4  # the next tick, which comes at once, receives more
ROWS_PER_SEQUENCE = 24  # running rows that cost as much as one sequence
STEPS_PER_SEQUENCE = 40
MOST_WITHOUT_LAUNCH = 32  # sequences that a tick receives if it can launch nothing
BURST = 512  # new requests that a tick only takes in
CROWDED = 128  # running rows beside whose results no request is received
PAGES_PER_LOOK = 1024  # cached pages that cost as much as one look when they are opened


def max_received(num_running: int) -> int:
    """New sequences that enter the queue in one tick; a larger group of one request comes alone."""
    return max(LEAST_RECEIVED, MOST - num_running // ROWS_PER_SEQUENCE)


def max_looks(state: SchedulerState, *, num_finished: int) -> int:
    """Waiting sequences that one tick looks at, to admit them, after it has finished others."""
    return max(_steady(state.spec), MOST - len(state.running) // ROWS_PER_SEQUENCE - num_finished)


def max_finished(spec: EngineSpec) -> int:
    """Sequences of those whose last token came that one tick finishes."""
    return _steady(spec)


def _steady(spec: EngineSpec) -> int:
    return max(LEAST, spec.max_rows // STEPS_PER_SEQUENCE)


class Intake:
    """Requests that wait for their turn, in order of arrival. `len` is the number of events."""

    __slots__ = ("_held", "_held_ids", "_is_postponed")

    def __init__(self) -> None:
        self._held: deque[AdmitRequest | Cancel] = deque()
        self._held_ids: set[str] = set()  # of requests
        self._is_postponed = False  # the last tick received none, though some were held

    def __len__(self) -> int:
        return len(self._held)

    def next_tick(
        self, events: list[SchedulerEvent], *, num_running: int = 0, may_launch: bool = True
    ) -> list[SchedulerEvent]:
        """The events of one tick in which so many rows run, of those that just came and those that
        are held. Without `may_launch` nothing is launched unless one of the events allows it.

        NOTE: a cancel never overtakes its request: it is held behind a request that is held, since
        the scheduler ignores a cancel of a request that it does not know.
        """
        requests = [event for event in events if isinstance(event, AdmitRequest)]
        self._held.extend(requests)
        self._held_ids.update([request.request_id for request in requests])
        tick: list[SchedulerEvent] = []
        if len(requests) < len(events):
            tick = self._hold_cancels(events)
        if self._postpones(len(requests), has_results=bool(tick) and num_running >= CROWDED):
            return tick
        may_launch = may_launch or bool(tick)
        room = most = max_received(num_running) if may_launch else MOST_WITHOUT_LAUNCH
        while self._held and (room == most or _size(self._held[0]) <= room):
            event = self._held.popleft()
            room -= _size(event)
            tick.append(event)
            if isinstance(event, AdmitRequest):
                self._held_ids.discard(event.request_id)
        return tick

    def _postpones(self, num_new: int, *, has_results: bool) -> bool:
        """Whether the requests are received in the next tick, which comes at once, because this one
        has enough to do. It never happens twice in a row.
        """
        is_full = num_new > BURST or (has_results and len(self._held) > 0)
        self._is_postponed = is_full and not self._is_postponed
        return self._is_postponed

    def _hold_cancels(self, events: list[SchedulerEvent]) -> list[SchedulerEvent]:
        """Holds the cancels of requests that are held, and returns the others."""
        tick: list[SchedulerEvent] = []
        for event in events:
            match event:
                case AdmitRequest():
                    pass
                case Cancel() if event.request_id in self._held_ids:
                    self._held.append(event)
                case _:
                    tick.append(event)
        return tick


def _size(event: AdmitRequest | Cancel) -> int:
    return event.sampling.n if isinstance(event, AdmitRequest) else 0
