"""From choices to one `ScheduleBatch`: everything the device is told about a step, as host values.

Knows no rules of choice. Writes `SchedulerState.steps`, `SchedulerState.next_iteration`, a
sequence's flights (sent) and what the device knows of its row (`written_pages`, `relay_iteration`).
"""

from __future__ import annotations

import numpy as np

from aserve.cache.allocation import PageAllocation, num_shared_pages
from aserve.messages.base import pack_i32
from aserve.messages.requests import stamp_of
from aserve.messages.step import Launch, PageWrites, RowInit, ScheduleBatch, StepStats, VerifyPlan
from aserve.scheduling.flights import Flight
from aserve.scheduling.forecast import relax
from aserve.scheduling.request import Sequence
from aserve.scheduling.select import Chosen
from aserve.scheduling.state import SchedulerState, Step


def launch(state: SchedulerState, chosen: list[Chosen], *, admitted: list[Sequence]) -> None:
    """Builds the batch from the state before this step, then puts the step in flight."""
    iteration = state.next_iteration
    state.next_iteration += 1
    relax(state)
    batch = _build(state, chosen, iteration=iteration, stats=_stats(state, chosen, admitted))
    state.steps[iteration] = Step(iteration, {})
    for choice in chosen:
        _put_in_flight(state, choice, iteration)
    state.effects.append(Launch((batch,)))


def _build(
    state: SchedulerState, chosen: list[Chosen], *, iteration: int, stats: StepStats
) -> ScheduleBatch:
    sequences = [choice.sequence for choice in chosen]
    sampled = [choice.sequence for choice in chosen if choice.samples]
    grown = [sequence for sequence in sequences if sequence.has_new_pages]
    drafts = [choice.num_drafts for choice in chosen]
    return ScheduleBatch(
        iteration=iteration,
        rows=pack_i32([sequence.row for sequence in sequences]),
        query_lens=pack_i32([choice.query_len for choice in chosen]),
        input_ids=b"".join(_input_ids(choice) for choice in chosen),
        next_ids=pack_i32([_next_id(choice) for choice in chosen]),
        kv_lens=pack_i32([sequence.scheduled_len for sequence in sequences]),
        bounds=bytes(sequence.is_bound for sequence in sequences),
        expects=pack_i32([_expected_iteration(choice) for choice in chosen]),
        sample_rows=pack_i32([sequence.row for sequence in sampled if sequence.mask is None]),
        held_rows=pack_i32([sequence.row for sequence in sampled if sequence.mask is not None]),
        page_writes=tuple(_page_writes(grown, group) for group in range(len(state.spec.groups))),
        row_inits=_row_inits(grown),
        verify=VerifyPlan(pack_i32(drafts)) if any(drafts) else None,
        stats=stats,
        shared_pages=num_shared_pages(_holdings(chosen)) if state.spec.names_shared_pages else 0,
    )


def _holdings(chosen: list[Chosen]) -> list[PageAllocation]:
    return [choice.sequence.allocation for choice in chosen if choice.sequence.allocation]


def _input_ids(choice: Chosen) -> bytes:
    """Known tokens as they are; the token in flight and the drafts after it as -row."""
    sequence = choice.sequence
    if choice.query_len == 1 and sequence.flights.num_sampling:
        return (-sequence.row).to_bytes(4, "little", signed=True)
    ids = np.full(choice.query_len, -sequence.row, np.int32)
    if not sequence.flights.num_sampling:
        start = sequence.scheduled_len
        known = sequence.tokens.span(start, start + choice.query_len)
        ids[: len(known)] = known
    return ids.tobytes()


def _next_id(choice: Chosen) -> int:
    """The token after the span: the next one of the prompt for a middle chunk, else one that is
    not known yet, or never will be.
    """
    sequence = choice.sequence
    if choice.samples or choice.ends:
        return -sequence.row
    return sequence.tokens.at(sequence.scheduled_len + choice.query_len)


def _expected_iteration(choice: Chosen) -> int:
    """The stamp of the step whose stash this row reads from the relay: the last that samples it."""
    sequence = choice.sequence
    reads_relay = sequence.flights.num_sampling > 0 or choice.num_drafts > 0
    return stamp_of(sequence.relay_iteration) if reads_relay else 0


def _page_writes(sequences: list[Sequence], group: int) -> PageWrites:
    """Page table entries that the device does not have; all of a row that is new to it."""
    rows: list[bytes] = []
    columns: list[bytes] = []
    pages: list[bytes] = []
    for sequence in sequences:
        assert sequence.allocation is not None
        start, stop = sequence.written_pages, sequence.allocation.num_pages
        rows.append(sequence.row.to_bytes(4, "little") * (stop - start))
        pages.append(sequence.allocation.pages[group][start:].tobytes())
        if stop == start + 1:
            columns.append(start.to_bytes(4, "little"))
        else:
            columns.append(np.arange(start, stop, dtype=np.int32).tobytes())
    return PageWrites(rows=b"".join(rows), columns=b"".join(columns), pages=b"".join(pages))


def _row_inits(sequences: list[Sequence]) -> tuple[RowInit, ...]:
    return tuple(sequence.row_init() for sequence in sequences if not sequence.written_pages)


def _put_in_flight(state: SchedulerState, choice: Chosen, iteration: int) -> None:
    sequence = choice.sequence
    assert sequence.allocation is not None
    flight = Flight(
        iteration=iteration,
        query_len=choice.query_len,
        num_drafts=choice.num_drafts,
        samples=choice.samples,
        is_held=choice.samples and sequence.mask is not None,
        ends=choice.ends,
    )
    sequence.flights.send(flight)
    sequence.last_iteration = iteration
    sequence.written_pages = sequence.allocation.num_pages
    if choice.samples:
        sequence.relay_iteration = iteration
    state.steps[iteration].rows[sequence.row] = (sequence, flight)


def _stats(state: SchedulerState, chosen: list[Chosen], admitted: list[Sequence]) -> StepStats:
    new_rows = {sequence.row for sequence in admitted}
    prefills = [choice for choice in chosen if choice.is_prefill or choice.sequence.row in new_rows]
    total = state.spec.groups[0].num_pages - 1
    return StepStats(
        num_prefill_rows=len(prefills),
        num_prefill_tokens=sum(choice.query_len for choice in prefills),
        num_decode_rows=len(chosen) - len(prefills),
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_retracted=state.num_retracted,
        num_cached_tokens=sum(sequence.committed_len for sequence in admitted),
        used_pages=state.cache.num_used(0),
        total_pages=total,
    )
