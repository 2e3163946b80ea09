"""After a failed step: everything outstanding is dropped, rows are told to the device anew, and
halves are tried alone until the guilty row is found. Knows nothing of why a step failed. Writes
`SchedulerState.retries` (in) and `SchedulerState.resync_at`.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo, StepError
from aserve.messages.results import StepFailed
from aserve.messages.step import Resync
from aserve.scheduling.finish import finish, settle
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState

MAX_LONE_FAILURES = 2


def fail_step(state: SchedulerState, failed: StepFailed) -> None:
    """Failures that come after the one that was acted on, of steps before the resync, are old
    news.
    """
    if failed.iteration < state.resync_at:
        return
    named = _named_by(state, failed.iteration)
    _drop_outstanding(state)
    state.resync_at = state.next_iteration
    state.effects.append(Resync(iteration=state.next_iteration))
    if len(named) == 1:
        _blame(state, named[0], failed.error)
    _try_next(state, [sequence for sequence in named if sequence.phase is Phase.RUNNING])


def _named_by(state: SchedulerState, iteration: int) -> list[Sequence]:
    """Who rode in the failed step; for a failed Sample (its step is back already) who was
    sampled.
    """
    step = state.steps.get(iteration)
    if step is not None:
        return [flight.sequence for flight in step.rows.values()]
    return [flight.sequence for (number, _), flight in state.samples.items() if number == iteration]


def _drop_outstanding(state: SchedulerState) -> None:
    """Clears all flights; every row that a dropped step names is new to the device again, and
    has no drafts.
    """
    for sequence in list(state.living()):
        if not sequence.flights:
            continue
        sequence.written_pages = 0
        sequence.relay_stamp = 0
        sequence.drop_flights()
        settle(state, sequence)
    state.steps.clear()
    state.samples.clear()


def _blame(state: SchedulerState, sequence: Sequence, error: ErrorInfo) -> None:
    """Counts a failure of a step that named only one row; the second in a row ends the request.

    A row that was retracted while its step was in flight is as guilty as one that was not.
    """
    if sequence.phase is Phase.ENDED:
        return
    sequence.failures += 1
    if sequence.failures >= MAX_LONE_FAILURES:
        info = StepError(f"The engine failed twice on this request alone: {error.message}").info()
        finish(state, sequence, "error", error=info)


def _try_next(state: SchedulerState, suspects: list[Sequence]) -> None:
    half = (len(suspects) + 1) // 2
    state.retries[:0] = [group for group in (suspects[:half], suspects[half:]) if group]
