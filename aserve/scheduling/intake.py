"""Splits the events that came into turns of bounded work: results, masks and cancels at once, new
requests a few per turn.
"""

from __future__ import annotations

from collections import deque

from aserve.messages.executor import SchedulerEvent
from aserve.messages.requests import AdmitRequest, Cancel
from aserve.scheduling.turn import max_received


class Intake:
    """Requests that wait for their turn, in order of arrival. `len` is the number of events."""

    __slots__ = ("_held", "_num_held_by_id")

    def __init__(self) -> None:
        self._held: deque[AdmitRequest | Cancel] = deque()
        self._num_held_by_id: dict[str, int] = {}  # events

    def __len__(self) -> int:
        return len(self._held)

    def next_turn(
        self, events: list[SchedulerEvent], *, num_running: int = 0
    ) -> list[SchedulerEvent]:
        """The events of one turn in which so many rows run, of those that just came and those that
        are held.

        NOTE: a cancel never overtakes its request: it is held behind a request that is held, since
        the scheduler ignores a cancel of a request that it does not know.
        """
        turn: list[SchedulerEvent] = []
        for event in events:
            match event:
                case AdmitRequest():
                    self._hold(event)
                case Cancel() if event.request_id in self._num_held_by_id:
                    self._hold(event)
                case _:
                    turn.append(event)
        most = max_received(num_running)
        room = most
        while self._held and (room == most or _size(self._held[0]) <= room):
            room -= _size(self._held[0])
            turn.append(self._release())
        return turn

    def _hold(self, event: AdmitRequest | Cancel) -> None:
        self._held.append(event)
        self._num_held_by_id[event.request_id] = self._num_held_by_id.get(event.request_id, 0) + 1

    def _release(self) -> AdmitRequest | Cancel:
        event = self._held.popleft()
        self._num_held_by_id[event.request_id] -= 1
        if not self._num_held_by_id[event.request_id]:
            del self._num_held_by_id[event.request_id]
        return event


def _size(event: AdmitRequest | Cancel) -> int:
    return event.sampling.n if isinstance(event, AdmitRequest) else 0
