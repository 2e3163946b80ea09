"""What observers are told about one turn of the scheduler: values, after everything was performed.

Must not know who observes; written by the scheduler actor, once per turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from aserve.messages import SchedulerEffect, SchedulerEvent


@dataclass(frozen=True, slots=True)
class Seat:
    """A sequence got a row, and step `iteration` is the first that names it there."""

    request_id: str
    child: int
    row: int
    iteration: int


@dataclass(frozen=True, slots=True)
class SchedulerTurn:
    events: list[SchedulerEvent]
    effects: list[SchedulerEffect]
    seats: tuple[Seat, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0


class SchedulerObserver(Protocol):
    def turned(self, turn: SchedulerTurn) -> None: ...
