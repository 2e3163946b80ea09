"""Finds the row that makes a step fail, so that one bad request does not end the others.

How recovery works:

- A step that failed says nothing about which of its rows was at fault. Later steps were launched
  before the failure was known, and their inputs come from tokens that were never sampled. So the
  executor fails every step up to a `Resync`, and the scheduler drops all flights and sends one.
- Dropping flights loses nothing that counted: tokens become facts only when a result is committed,
  in launch order. Committed KV stays valid, because a failed step writes only behind it. Each row
  that a dropped step named is new to the device again: its next launch carries its sampling state
  and its whole page table, and it reads nothing from the relay.
- The rows of the failed step are suspects. They are split in two groups, and each group is run
  alone, with nothing else in flight (`select._choose_retry`). A group that fails is split again, so
  that one guilty row among n is found in about log2(n) failures. The rows of a group that succeeds
  go on as all others do.
- A step that named one row only and failed is held against that row. The second such failure in a
  row ends its request: one may have been an accident of the device.
- Rows that were retracted meanwhile count as well. Any result of a row resets its failures.

Recovery always ends: each failure halves a group or adds to the count of a single row. Written
here: `SchedulerState.retries` (in) and `SchedulerState.resync_at`.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo, StepError
from aserve.messages.results import StepFailed
from aserve.messages.step import Resync
from aserve.scheduling.finish import finish, settle
from aserve.scheduling.flights import drop_flights
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState

MAX_LONE_FAILURES = 2


def fail_step(state: SchedulerState, failed: StepFailed) -> None:
    """Drops what is in flight and begins to look for the guilty row. A failure of a step before the
    last resync was acted on already, and is ignored.
    """
    state.landed = max(state.landed, failed.iteration)
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
    """Returns the rows of the failed step; for a failed Sample, whose step is back already, its
    rows.
    """
    step = state.steps.get(iteration)
    if step is not None:
        return list(step.sequences)
    return [
        step.sequences[step.index_of(row)]
        for (number, row), step in state.samples.items()
        if number == iteration
    ]


def _drop_outstanding(state: SchedulerState) -> None:
    """Clears all flights; every row that a dropped step names is new to the device again, and
    has no drafts.
    """
    for sequence in list(state.living()):
        if not sequence.num_flights or sequence.phase is Phase.AWAITING_KV:
            continue
        sequence.written_pages = 0
        sequence.relay_stamp = 0
        drop_flights(sequence)
        settle(state, sequence)
    for row in state.held:
        state.running[row].is_blocked = False
    state.held.clear()
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
