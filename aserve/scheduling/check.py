"""Asserts the scheduler's invariants, and tells the story of the sequence that breaks one. It runs
after every tick with debug checks, which all tests turn on.
"""

from __future__ import annotations

from collections import Counter

from aserve.errors import BugError
from aserve.scheduling.clients import PROMPT_WEIGHT, Client
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
    for sequence in state.living():
        _check_sequence(state, sequence)
    _check_clients(state)
    if len(state.steps) > state.spec.depth:
        raise BugError(f"{len(state.steps)} steps are in flight, depth is {state.spec.depth}")


def _check_rows(state: SchedulerState) -> None:
    if state.rows.num_free + len(state.running) != state.spec.max_rows:
        raise BugError(
            f"{state.rows.num_free} free rows and {len(state.running)} running ones are not "
            f"{state.spec.max_rows}"
        )
    for row, sequence in state.running.items():
        if sequence.row != row or sequence.phase not in OWNERS:
            raise BugError(f"row {row} names {describe(sequence)}")


def _check_clients(state: SchedulerState) -> None:
    """Each client has as many living sequences, rows and unpaid prompt tokens as it is said to."""
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


def _check_sequence(state: SchedulerState, sequence: Sequence) -> None:
    is_running = sequence.phase in OWNERS
    problems = {
        "owns a row while it does not run": not is_running and sequence.row != 0,
        "owns pages while it does not run": not is_running and sequence.allocation is not None,
        "waits with flights": sequence.phase is Phase.WAITING and bool(sequence.flights),
        "samples further ahead than lead": sequence.num_sampling > state.spec.lead,
        "has more outputs than max_tokens": sequence.num_outputs > sequence.max_tokens,
        "committed KV beyond its tokens": sequence.committed_len > sequence.tokens.num,
        "scheduled KV beyond what it can need": is_running
        and sequence.scheduled_len > sequence.max_kv_len,
        "has outputs before its prompt's scores": sequence.num_scored < sequence.prompt_len
        and sequence.num_outputs > 0,
        "counts its flights wrongly": not _are_sums_right(sequence),
        "has flights out of order": _iterations(sequence) != sorted(_iterations(sequence)),
    }
    found = [problem for problem, holds in problems.items() if holds]
    if found:
        raise BugError(f"{describe(sequence)}: {'; '.join(found)}")


def _are_sums_right(sequence: Sequence) -> bool:
    """NOTE: the lengths of a sequence that was retracted have no meaning until it waits again."""
    flights = sequence.flights
    num_sampling = sum(flight.samples for flight in flights)
    max_outputs = sum(flight.max_outputs for flight in flights)
    num_uncertain = sum(flight.num_uncertain for flight in flights)
    if (num_sampling, num_uncertain) != (sequence.num_sampling, sequence.num_uncertain):
        return False
    scheduled_len = sequence.committed_len + sum(flight.max_advance for flight in flights)
    remaining = sequence.tokens.num + max_outputs - scheduled_len
    is_right = (scheduled_len, remaining) == (sequence.scheduled_len, sequence.remaining)
    return is_right or sequence.phase is Phase.LINGERING


def _iterations(sequence: Sequence) -> list[int]:
    return [flight.iteration for flight in sequence.flights]


def describe(sequence: Sequence) -> str:
    """A sequence's story in one line, for BugErrors."""
    return (
        f"{sequence.request_id}/{sequence.child} phase={sequence.phase.value} row={sequence.row} "
        f"prompt={sequence.prompt_len} outputs={sequence.num_outputs} "
        f"committed={sequence.committed_len} scheduled={sequence.scheduled_len} "
        f"flights={_iterations(sequence)}"
    )
