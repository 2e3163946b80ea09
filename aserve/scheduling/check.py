"""Asserts the scheduler's invariants, and tells the story of the sequence that breaks one. It runs
after every tick with debug checks, which all tests turn on.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from aserve.errors import BugError
from aserve.scheduling.clients import PROMPT_WEIGHT, Client
from aserve.scheduling.flights import Step
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState

OWNERS = (Phase.AWAITING_KV, Phase.RUNNING)  # the phases that own a row and pages


def check(state: SchedulerState) -> None:
    """Raises a BugError unless each row and page has one owner, lengths agree with the flights, and
    no sequence is in two places.
    """
    _check_rows(state)
    state.cache.check(
        sequence.allocation for sequence in state.running.values() if sequence.allocation
    )
    flights = _flights(state)
    for sequence in state.living():
        _check_sequence(state, sequence, flights[sequence])
    _check_clients(state)
    if len(state.steps) > state.spec.depth:
        raise BugError(f"{len(state.steps)} steps are in flight, depth is {state.spec.depth}")


def _check_rows(state: SchedulerState) -> None:
    if state.rows.num_free + len(state.running) != state.spec.max_rows:
        raise BugError(
            f"{state.rows.num_free} free rows and {len(state.running)} running ones are not "
            f"{state.spec.max_rows}"
        )
    table, num_known = state.table, sum(row is not None for row in state.table.sequences.tolist())
    if num_known != len(state.running) or state.running_rows.tolist() != list(state.running):
        raise BugError(f"the columns know {num_known} of {len(state.running)} running rows")
    if table.remaining.sum() != sum(sequence.remaining for sequence in state.running.values()):
        raise BugError(f"a row without a sequence has tokens to compute: {table.remaining}")
    for row, sequence in state.running.items():
        if table.sequences[row] is not sequence or table.request_ids[row] != sequence.request_id:
            raise BugError(
                f"the columns have another sequence in row {row} than {describe(sequence)}"
            )
        if sequence.row != row or sequence.phase not in OWNERS:
            raise BugError(f"row {row} names {describe(sequence)}")
        if sequence.rank != (row - 1) % state.spec.dp_size:
            raise BugError(f"rank {sequence.rank} has the pages of {describe(sequence)}")


def _check_clients(state: SchedulerState) -> None:
    """Checks the numbers of living sequences, rows and unpaid prompt tokens of each client."""
    living: Counter[Client] = Counter()
    running: Counter[Client] = Counter()
    unpaid: Counter[Client] = Counter()
    for sequence in state.living():
        living[sequence.client] += 1
    for sequence in state.running.values():
        running[sequence.client] += 1
        unpaid[sequence.client] += sequence.unpaid
    if len(living) != state.clients.num_active:
        raise BugError(f"{len(living)} clients are active, not {state.clients.num_active}")
    for client, num_living in living.items():
        counted = (num_living, running[client], PROMPT_WEIGHT * unpaid[client])
        if counted != (client.num_living, client.num_rows, client.pending):
            raise BugError(f"client {client.client_id!r} is counted wrongly: {counted}")


def _check_sequence(
    state: SchedulerState, sequence: Sequence, flights: list[tuple[Step, int]]
) -> None:
    is_running = sequence.phase in OWNERS
    problems = {
        "owns a row while it does not run": not is_running and sequence.row != 0,
        "owns pages while it does not run": not is_running and sequence.allocation is not None,
        "waits with flights": sequence.phase is Phase.WAITING and sequence.num_flights > 0,
        "samples further ahead than lead": sequence.num_sampling > state.spec.lead,
        "has more outputs than max_tokens": sequence.num_outputs > sequence.max_tokens,
        "committed KV beyond its tokens": sequence.committed_len > sequence.tokens.num,
        "scheduled KV beyond what it can need": is_running
        and sequence.scheduled_len > sequence.max_kv_len,
        "has outputs before its prompt's scores": sequence.num_scored < sequence.prompt_len
        and sequence.num_outputs > 0,
        "counts its flights wrongly": not _are_sums_right(sequence, flights),
        "has wrong copies in the columns": is_running and not _are_copies_right(state, sequence),
    }
    found = [problem for problem, holds in problems.items() if holds]
    if found:
        raise BugError(f"{describe(sequence)}: {'; '.join(found)}")


def _flights(state: SchedulerState) -> defaultdict[Sequence, list[tuple[Step, int]]]:
    """The flights of each sequence, counted anew: the step of each, and its place there. A flight
    that samples with a mask is in flight as long as it is held or its Sample is.
    """
    found: defaultdict[Sequence, list[tuple[Step, int]]] = defaultdict(list)
    for step in state.steps.values():
        for index, sequence in enumerate(step.sequences):
            is_masked = sequence.mask is not None and step.max_outputs[index] > 0
            if sequence.first_iteration <= step.iteration and not is_masked:
                found[sequence].append((step, index))
    waiting = [*state.held.items(), *((row, step) for (_, row), step in state.samples.items())]
    for row, step in waiting:
        index = step.index_of(row)
        sequence = step.sequences[index]
        if sequence.first_iteration <= step.iteration:
            found[sequence].append((step, index))
    for transfer in [*state.unsent, *state.transfers.values()]:
        if transfer.step is not None:
            found[transfer.sequence].append((transfer.step, 0))
    return found


def _are_sums_right(sequence: Sequence, flights: list[tuple[Step, int]]) -> bool:
    """NOTE: the lengths of a sequence that was retracted have no meaning until it waits again."""
    num_sampling = sum(step.max_outputs[index] > 0 for step, index in flights)
    max_outputs = sum(step.max_outputs[index] for step, index in flights)
    num_uncertain = sum(step.num_uncertain[index] for step, index in flights)
    sums = (sequence.num_flights, sequence.num_sampling, sequence.num_uncertain)
    if (len(flights), num_sampling, num_uncertain) != sums:
        return False
    scheduled_len = sequence.committed_len + sum(step.max_advance[i] for step, i in flights)
    remaining = sequence.tokens.num + max_outputs - scheduled_len
    is_right = (scheduled_len, remaining) == (sequence.scheduled_len, sequence.remaining)
    return is_right or sequence.phase is Phase.LINGERING


def _are_copies_right(state: SchedulerState, sequence: Sequence) -> bool:
    assert sequence.allocation is not None
    table, row, num_tokens = state.table, sequence.row, sequence.tokens.num
    last_id = sequence.tokens.at(num_tokens - 1)
    copies = (table.num_tokens[row], table.num_pages[row])
    is_right = copies == (num_tokens, sequence.allocation.num_pages)
    return is_right and (sequence.has_ended or table.last_id[row] == last_id)


def describe(sequence: Sequence) -> str:
    """Returns a sequence's story in one line, for BugErrors."""
    return (
        f"{sequence.request_id}/{sequence.child} phase={sequence.phase.value} row={sequence.row} "
        f"prompt={sequence.prompt_len} outputs={sequence.num_outputs} "
        f"committed={sequence.committed_len} scheduled={sequence.scheduled_len} "
        f"flights={sequence.num_flights} last={sequence.last_iteration}"
    )
