"""The phases of a sequence's life and the moves between them. Knows nothing of why a sequence
moves.
"""

from __future__ import annotations

from enum import Enum

from aserve.errors import BugError


class Phase(Enum):
    WAITING = "waiting"  # owns nothing; in the waiting queue
    RUNNING = "running"  # owns a row and pages
    LINGERING = "lingering"  # retracted: owns nothing, but results of it are still in flight
    ENDED = "ended"  # owns nothing; Retired was sent


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.LINGERING, Phase.ENDED}),
    Phase.LINGERING: frozenset({Phase.WAITING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


def check_move(before: Phase, after: Phase) -> None:
    if after not in MOVES[before]:
        raise BugError(f"a sequence cannot move from {before.value} to {after.value}")
