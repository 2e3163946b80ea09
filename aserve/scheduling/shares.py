"""What share of rows and of the queue a client may have while others want some.

A client's share of rows is max_rows / active clients. As long as nobody else waits, one client may
run on all rows. When a sequence waits whose client is below its share, and no row is free, rows of
the client that is furthest above the share are retracted. What they computed mostly stays in the
prefix cache, so coming back costs them little. A client never falls below its share by this, so two
clients cannot retract each other in turns.

WHY: no rows are kept free for newcomers. Kept rows would cost throughput all the time, and would
not suffice for the second newcomer.

Writes what sequences have not paid for; leave.py retracts.
"""

from __future__ import annotations

from collections import Counter

from aserve.errors import ErrorInfo, QueueFull
from aserve.scheduling.clients import Client
from aserve.scheduling.finish import retract, retraction_order
from aserve.scheduling.grammar_rows import has_slow_room
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState

MOST_RETRACTIONS = 8  # of one turn
PLACES_PER_FREE_ONE = 8


def make_way(state: SchedulerState) -> None:
    """Retracts rows of clients above their share for those below it that wait first in order."""
    if state.clients.num_active < 2 or state.is_recovering or not state.waiting:
        return
    share = max(1, state.spec.max_rows // state.clients.num_active)
    num_free = state.rows.num_free
    num_granted: Counter[Client] = Counter()
    looked_at: list[Sequence] = []
    while len(looked_at) < MOST_RETRACTIONS and (sequence := state.waiting.pop()) is not None:
        looked_at.append(sequence)
        client = sequence.client
        if not has_slow_room(state, sequence):
            continue
        if num_free:
            num_free -= 1
        elif client.num_rows + num_granted[client] >= share or not _retract_for(
            state, sequence, share=share
        ):
            break
        num_granted[client] += 1
    for sequence in looked_at:
        state.waiting.add(sequence)


def place_refusal(state: SchedulerState, client: Client, num_new: int) -> ErrorInfo | None:
    """Why a client may not have so many more sequences in the queue, though that has room.

    A client may hold 8 times as many places as remain free (the dynamic threshold of Choudhury and
    Hahne, 1998): 8/9 of an otherwise empty queue. So a flood leaves places for others, and each
    further flood leaves some again. Nobody is refused the first request, and a program that embeds
    the engine, which names no client, has the whole queue.
    """
    if not client.client_id or not client.num_waiting:
        return None
    limit = state.spec.max_waiting + state.rows.num_free
    num_free = limit - len(state.waiting) - num_new
    if client.num_waiting + num_new <= PLACES_PER_FREE_ONE * num_free:
        return None
    return QueueFull(
        f"Your other requests already hold {client.num_waiting} of the queue's "
        f"{state.spec.max_waiting} places, and it keeps some free for other clients. "
        "Try again later.",
        retry_after_s=1.0,
    ).info()


def prefill_order(sequence: Sequence) -> tuple[int, int, int]:
    """The client that was served least computes its prompts first, so that the long prompts of one
    do not delay the short ones of another.
    """
    return (sequence.priority, sequence.client.served, sequence.arrival)


def charge_prompt(sequence: Sequence, num_computed: int) -> None:
    """NOTE: what is computed again after a retraction was charged already, or is charged once."""
    num_charged = min(sequence.unpaid, num_computed)
    sequence.unpaid -= num_charged
    sequence.client.serve_prompt(num_charged)


def _retract_for(state: SchedulerState, sequence: Sequence, *, share: int) -> bool:
    """False if nobody of the same or a lower priority has more rows than the share."""
    rows = [
        row
        for row in state.running.values()
        if row.client.num_rows > share and row.priority >= sequence.priority
    ]
    if not rows:
        return False
    retract(state, max(rows, key=lambda row: (row.client.num_rows, retraction_order(row))))
    return True
