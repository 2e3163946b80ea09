"""One tick of the scheduler: how much it may do, and which events come in it.

A tick costs about 3 us for every running row, and 20 to 40 us for every sequence that is received,
admitted or finished in it. So a tick receives, admits and finishes more sequences when few rows
run, and leaves the others to the next tick. The lower bounds suffice for a steady load in which
each sequence runs for at least 40 steps.
"""

from __future__ import annotations

from collections import deque

from aserve.messages.changes import Amend
from aserve.messages.executor import EngineSpec, SchedulerEvent
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.scheduling.state import SchedulerState

MAX_SEQUENCES = 10  # received, admitted or finished per tick while no row runs
MIN_SEQUENCES = 6  # admitted or finished per tick, however many rows run
MIN_RECEIVED = 4  # received per tick, however many rows run; the next tick comes at once
ROWS_PER_SEQUENCE = 24  # running rows that cost as much as one sequence
STEPS_PER_SEQUENCE = 40  # the shortest mean life for which MIN_SEQUENCES of a tick suffice
MAX_WITHOUT_LAUNCH = 32  # sequences that a tick receives if it cannot launch a step
SEQUENCES_PER_ESTIMATE = 4  # received sequences that cost as much as the estimate of one wait
BURST = 512  # a tick in which more requests than this arrive only stores them
CROWDED = 128  # with this many rows, a tick that commits results receives no requests
PAGES_PER_LOOK = 1024  # cached pages that cost as much as one look when they are opened


def max_received(num_running: int) -> int:
    """Returns how many new sequences enter the queue in one tick. A request with more children
    than that enters alone.
    """
    return max(MIN_RECEIVED, MAX_SEQUENCES - num_running // ROWS_PER_SEQUENCE)


def max_looks(state: SchedulerState, *, num_finished: int) -> int:
    """Returns how many waiting sequences a tick tries to admit after it has finished others."""
    return max(
        _steady(state.spec), MAX_SEQUENCES - len(state.running) // ROWS_PER_SEQUENCE - num_finished
    )


def max_finished(spec: EngineSpec) -> int:
    """Returns how many sequences whose last token has come a tick finishes."""
    return _steady(spec)


def _steady(spec: EngineSpec) -> int:
    return max(MIN_SEQUENCES, spec.max_rows // STEPS_PER_SEQUENCE)


class Arrivals:
    """Requests that have arrived and are received in a later tick, in order of arrival, each with
    its cancel and changes. `len` is the number of these events.
    """

    __slots__ = ("_held", "_held_ids", "_is_postponed")

    def __init__(self) -> None:
        self._held: deque[AdmitRequest | Cancel | Amend] = deque()
        self._held_ids: set[str] = set()  # of requests
        self._is_postponed = False  # the last tick received none, although some waited

    def __len__(self) -> int:
        return len(self._held)

    def next_tick(
        self, events: list[SchedulerEvent], *, num_running: int = 0, may_launch: bool = True
    ) -> list[SchedulerEvent]:
        """Returns the events of one tick, out of those that just came and those that are held.
        Without `may_launch` the tick launches no step unless one of the new events allows it.

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
        room = most = max_received(num_running) if may_launch else MAX_WITHOUT_LAUNCH
        while self._held and (room == most or _size(self._held[0]) <= room):
            event = self._held.popleft()
            room -= _size(event)
            tick.append(event)
            if isinstance(event, AdmitRequest):
                self._held_ids.discard(event.request_id)
        return tick

    def _postpones(self, num_new: int, *, has_results: bool) -> bool:
        """Returns whether this tick has enough to do without receiving requests. Then the next
        tick, which comes at once, receives them. It never happens in two ticks in a row.
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
                case Cancel() | Amend() if event.request_id in self._held_ids:
                    self._held.append(event)
                case _:
                    tick.append(event)
        return tick


def _size(event: AdmitRequest | Cancel | Amend) -> int:
    if not isinstance(event, AdmitRequest):
        return 0
    has_limits = event.strict_deadline_s is not None or event.queue_deadline_s is not None
    return max(event.sampling.n, SEQUENCES_PER_ESTIMATE if has_limits else 0)
