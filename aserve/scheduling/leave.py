"""How a sequence leaves its row: it ends (for any reason), or it is retracted and comes again.

Row and pages are given back at once: whatever reuses them is launched later on the same stream.
Committed whole pages enter the prefix tree. Knows nothing of why; writes `Board.running`,
`Board.groups` and the phase.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo
from aserve.messages import Cancel, FailRequest, FinishReason, Retired
from aserve.scheduling.board import Board
from aserve.scheduling.followers import abandon, unfollow
from aserve.scheduling.phases import Phase
from aserve.scheduling.request import Sequence


def leave(
    board: Board,
    sequence: Sequence,
    reason: FinishReason,
    *,
    stop_id: int | None = None,
    error: ErrorInfo | None = None,
    kept: int | None = None,
) -> None:
    """Ends a sequence in any phase; Retired is its last message. Results that are still in
    flight will fall away.
    """
    if sequence.phase is Phase.RUNNING:
        _give_back(board, sequence)
    elif sequence.leader is not None:
        unfollow(board, sequence)
    elif sequence.phase is Phase.WAITING:
        board.waiting.remove(sequence)
    board.clients.leave(sequence.client)
    sequence.flights.drop()
    sequence.move(Phase.ENDED)
    children = board.groups[sequence.request_id]
    del children[sequence.child]
    if not children:
        del board.groups[sequence.request_id]
    board.effects.append(
        Retired(
            request_id=sequence.request_id,
            child=sequence.child,
            reason=reason,
            num_outputs=sequence.num_outputs if kept is None else kept,
            stop_id=stop_id,
            error=error,
        )
    )


def cancel(board: Board, event: Cancel) -> None:
    """One child or all; what is not known (any more) is ignored."""
    children = board.groups.get(event.request_id, {})
    for child, sequence in list(children.items()):
        if event.child is None or event.child == child:
            kept = event.kept if event.reason == "stop" else None
            leave(board, sequence, event.reason, kept=kept)


def fail(board: Board, event: FailRequest) -> None:
    """All children; what is not known (any more) is ignored."""
    for sequence in list(board.groups.get(event.request_id, {}).values()):
        leave(board, sequence, "error", error=event.error)


def retract(board: Board, sequence: Sequence) -> None:
    """Steps back with what it generated. Results in flight are kept; a held flight without its
    Sample is dropped.
    """
    _give_back(board, sequence)
    sequence.flights.drop_held()
    sequence.move(Phase.LINGERING)
    board.num_retracted += 1
    settle(board, sequence)


def settle(board: Board, sequence: Sequence) -> None:
    """A retracted sequence waits again, at its old place, once nothing of it is in flight."""
    if sequence.phase is Phase.LINGERING and not sequence.flights:
        sequence.move(Phase.WAITING)
        board.waiting.add(sequence)


def retraction_order(sequence: Sequence) -> tuple[int, int, int]:
    """The greatest goes first: lowest priority, then fewest outputs, then latest."""
    return (sequence.priority, -sequence.num_outputs, sequence.arrival)


def _give_back(board: Board, sequence: Sequence) -> None:
    assert sequence.holding is not None
    keys = sequence.page_keys(board.spec.page_size)
    committed = min(sequence.committed_len, sequence.tokens.num)
    board.cache.close(sequence.holding, keys, num_pages=committed // board.spec.page_size)
    board.rows.give_back(sequence.row)
    del board.running[sequence.row]
    board.masked.pop(sequence.row, None)
    sequence.client.give_back_row(sequence.unpaid)
    board.waiting.reorder(sequence.client)
    abandon(board, sequence)
    sequence.row = 0
    sequence.holding = None
    sequence.committed_len = 0
    sequence.relay_iteration = 0
    sequence.written_pages = 0
