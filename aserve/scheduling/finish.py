"""Takes sequences off their rows: a sequence ends, or it is retracted and waits again.

Row and pages are given back at once, because a step that reuses them is launched later on the same
stream; pages that a transfer still writes are held (transfers.py). Committed whole pages enter the
prefix tree. Writes `SchedulerState.running`, `SchedulerState.groups` and the phase.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo
from aserve.messages.base import FinishReason
from aserve.messages.output import Retired
from aserve.messages.requests import Cancel, FailRequest
from aserve.scheduling.flights import land_without_row
from aserve.scheduling.followers import abandon, unfollow
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState


def finish(
    state: SchedulerState,
    sequence: Sequence,
    reason: FinishReason,
    *,
    stop_id: int | None = None,
    error: ErrorInfo | None = None,
    kept: int | None = None,
) -> None:
    """Ends a sequence in any phase; Retired is its last message. Results that are still in flight
    will be ignored.
    """
    if sequence.row:
        _give_back(state, sequence)
    elif sequence.leader is not None:
        unfollow(state, sequence)
    elif sequence.phase is Phase.WAITING:
        (state.waiting if sequence in state.waiting else state.slow_waiting).remove(sequence)
    state.clients.finish(sequence.client)
    sequence.move(Phase.ENDED)
    children = state.groups[sequence.request_id]
    del children[sequence.child]
    if not children:
        del state.groups[sequence.request_id]
    state.effects.append(
        Retired(
            request_id=sequence.request_id,
            child=sequence.child,
            reason=reason,
            num_outputs=sequence.num_outputs if kept is None else kept,
            stop_id=stop_id,
            error=error,
        )
    )


def finish_ended(state: SchedulerState, *, most: int) -> int:
    """Finishes the sequences whose last tokens are known, in the order in which they ended, and
    returns how many. A step may end all its rows at once: `most` bounds a tick's work.
    """
    num_finished = min(most, len(state.ended))
    for _ in range(num_finished):
        sequence = state.ended.popleft()
        if sequence.phase is not Phase.ENDED:
            finish_at_end(state, sequence)
    return num_finished


def finish_at_end(state: SchedulerState, sequence: Sequence) -> None:
    stop_id = sequence.stop_id
    finish(state, sequence, "length" if stop_id is None else "stop", stop_id=stop_id)


def cancel(state: SchedulerState, event: Cancel) -> None:
    """Ends one child or all. Those that are not known (any more) or have ended by themselves are
    left alone.
    """
    children = state.groups.get(event.request_id, {})
    for child, sequence in list(children.items()):
        is_named = event.child is None or event.child == child
        if is_named and not sequence.has_ended:
            kept = event.kept if event.reason == "stop" else None
            finish(state, sequence, event.reason, kept=kept)


def fail(state: SchedulerState, event: FailRequest) -> None:
    """Ends all children with the error. A request that is not known (any more) is ignored."""
    for sequence in list(state.groups.get(event.request_id, {}).values()):
        finish(state, sequence, "error", error=event.error)


def retract(state: SchedulerState, sequence: Sequence) -> None:
    """Takes the row of a sequence for others."""
    step_back(state, sequence)
    state.num_retracted += 1


def step_back(state: SchedulerState, sequence: Sequence) -> None:
    """Takes the row of a sequence, which keeps what it generated. Results in flight still count; a
    held flight without its Sample is dropped.
    """
    held, row = state.held.get(sequence.row), sequence.row
    _give_back(state, sequence)
    if held is not None:
        land_without_row(held, held.index_of(row))
    sequence.move(Phase.LINGERING)
    settle(state, sequence)


def settle(state: SchedulerState, sequence: Sequence) -> None:
    """A retracted sequence waits again, at its old place, once nothing of it is in flight."""
    if sequence.phase is Phase.LINGERING and not sequence.num_flights:
        sequence.move(Phase.WAITING)
        sequence.restart(0)
        state.waiting.add(sequence)


def retraction_order(sequence: Sequence) -> tuple[int, int, int]:
    """The greatest goes first: lowest priority, then fewest outputs, then latest."""
    return (sequence.priority, -sequence.num_outputs, sequence.arrival)


def _give_back(state: SchedulerState, sequence: Sequence) -> None:
    assert sequence.allocation is not None
    has_keys = state.spec.prefix_cache
    keys = sequence.page_keys(state.spec.page_size) if has_keys else sequence.keys
    num_pages = sequence.cacheable_len // state.spec.page_size
    state.cache.of(sequence.allocation).close(sequence.allocation, keys, num_pages=num_pages)
    state.rows.give_back(sequence.row)
    state.unseat(sequence)
    state.masked.pop(sequence.row, None)
    if state.held.pop(sequence.row, None) is not None:
        sequence.is_blocked = False
    sequence.client.give_back_row(sequence.unpaid)
    if sequence.unpaid:
        state.waiting.reorder(sequence.client)
        state.slow_waiting.reorder(sequence.client)
    abandon(state, sequence)
    sequence.leave_row(state.table)
