"""After a failed step: everything outstanding is dropped, rows are told to the device anew, and
halves are tried alone until the guilty row is found. Knows nothing of why a step failed. Writes
`Board.retries` (in) and `Board.resync_at`.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo, StepError
from aserve.messages import Resync, StepFailed
from aserve.scheduling.board import Board
from aserve.scheduling.leave import leave, settle
from aserve.scheduling.phases import Phase
from aserve.scheduling.request import Sequence

MAX_LONE_FAILURES = 2


def fail_step(board: Board, failed: StepFailed) -> None:
    """Failures that come after the one that was acted on, of steps before the resync, are old
    news.
    """
    if failed.iteration < board.resync_at:
        return
    named = _named_by(board, failed.iteration)
    _drop_outstanding(board)
    board.resync_at = board.next_iteration
    board.effects.append(Resync(iteration=board.next_iteration))
    if len(named) == 1:
        _blame(board, named[0], failed.error)
    _try_next(board, [sequence for sequence in named if sequence.phase is Phase.RUNNING])


def _named_by(board: Board, iteration: int) -> list[Sequence]:
    """Who rode in the failed step; for a failed Sample (its step is back already) who was
    sampled.
    """
    step = board.steps.get(iteration)
    if step is not None:
        return [sequence for sequence, _ in step.riders.values()]
    return [sequence for (number, _), (sequence, _) in board.samples.items() if number == iteration]


def _drop_outstanding(board: Board) -> None:
    """Clears all flights; every row that a dropped step names is new to the device again, and
    has no drafts.
    """
    for sequence in list(board.living()):
        if not sequence.flights:
            continue
        sequence.written_pages = 0
        sequence.relay_iteration = 0
        sequence.flights.drop()
        settle(board, sequence)
    board.steps.clear()
    board.samples.clear()


def _blame(board: Board, sequence: Sequence, error: ErrorInfo) -> None:
    """Counts a failure of a step that named only one row; the second in a row ends the request.

    A row that was retracted while its step was in flight is as guilty as one that was not.
    """
    if sequence.phase is Phase.ENDED:
        return
    sequence.failures += 1
    if sequence.failures >= MAX_LONE_FAILURES:
        info = StepError(f"The engine failed twice on this request alone: {error.message}").info()
        leave(board, sequence, "error", error=info)


def _try_next(board: Board, suspects: list[Sequence]) -> None:
    half = (len(suspects) + 1) // 2
    board.retries[:0] = [group for group in (suspects[:half], suspects[half:]) if group]
