"""Who goes first among clients beside the order of the queue: places to wait, and prompts.

Writes what sequences have not paid for.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo, QueueFull
from aserve.scheduling.clients import Client
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState

PLACES_PER_FREE_ONE = 8


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
