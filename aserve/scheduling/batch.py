"""Turns the chosen flights into one `ScheduleBatch`, which tells the device about the step in host
values, and puts them in flight.

Writes `SchedulerState.steps` and `SchedulerState.next_iteration`.
"""

from __future__ import annotations

import numpy as np

from aserve.cache.allocation import num_shared_pages
from aserve.messages.base import pack_i32
from aserve.messages.requests import stamp_of
from aserve.messages.step import Launch, PageWrites, RowInit, ScheduleBatch, StepStats, VerifyPlan
from aserve.scheduling.forecast import relax
from aserve.scheduling.request import Flight, Sequence
from aserve.scheduling.state import SchedulerState, Step


def launch(state: SchedulerState, flights: list[Flight], *, admitted: list[Sequence]) -> None:
    """Builds the batch from the state before this step, then puts the step in flight."""
    iteration = state.next_iteration
    state.next_iteration += 1
    relax(state)
    batch = _build(state, flights, iteration=iteration, stats=_stats(state, flights, admitted))
    state.steps[iteration] = Step(iteration, {flight.sequence.row: flight for flight in flights})
    stamp = stamp_of(iteration)
    for flight in flights:
        flight.sequence.send(flight, stamp=stamp)
    state.effects.append(Launch((batch,)))


def _build(
    state: SchedulerState, flights: list[Flight], *, iteration: int, stats: StepStats
) -> ScheduleBatch:
    sequences = [flight.sequence for flight in flights]
    grown = [sequence for sequence in sequences if sequence.has_new_pages]
    drafts = [flight.num_drafts for flight in flights]
    return ScheduleBatch(
        iteration=iteration,
        rows=pack_i32([sequence.row for sequence in sequences]),
        query_lens=pack_i32([flight.query_len for flight in flights]),
        input_ids=_input_ids(flights),
        next_ids=pack_i32([_next_id(flight) for flight in flights]),
        kv_lens=pack_i32([sequence.scheduled_len for sequence in sequences]),
        bounds=bytes([sequence.num_uncertain > 0 for sequence in sequences]),
        expects=pack_i32([_expected_stamp(flight) for flight in flights]),
        sample_rows=pack_i32([f.sequence.row for f in flights if f.samples and not f.is_held]),
        held_rows=pack_i32([flight.sequence.row for flight in flights if flight.is_held]),
        page_writes=tuple(_page_writes(grown, group) for group in range(len(state.spec.groups))),
        row_inits=_row_inits(grown),
        verify=VerifyPlan(pack_i32(drafts), state.spec.decode.tree) if any(drafts) else None,
        stats=stats,
        shared_pages=_shared_pages(sequences) if state.spec.names_shared_pages else 0,
    )


def _shared_pages(sequences: list[Sequence]) -> int:
    return num_shared_pages([row.allocation for row in sequences if row.allocation is not None])


def _input_ids(flights: list[Flight]) -> bytes:
    """Known tokens as they are; the token in flight and the drafts after it as -row.

    PERF: rows that decode come as one array, since an array for each took 1 us.
    """
    parts: list[bytes] = []
    unknown: list[int] = []
    for flight in flights:
        sequence = flight.sequence
        if sequence.num_sampling:
            unknown.extend([-sequence.row] * flight.query_len)
            continue
        start = sequence.scheduled_len
        known = sequence.tokens.span(start, start + flight.query_len)
        parts += [pack_i32(unknown), known.tobytes()]
        unknown = [-sequence.row] * (flight.query_len - len(known))
    return b"".join([*parts, pack_i32(unknown)])


def _next_id(flight: Flight) -> int:
    """The token after the span: the next one of the prompt for a middle chunk, else -row for one
    that is not known yet, or never will be.
    """
    sequence = flight.sequence
    end = sequence.scheduled_len + flight.query_len
    has_next = not flight.samples and end < sequence.tokens.num
    return sequence.tokens.at(end) if has_next else -sequence.row


def _expected_stamp(flight: Flight) -> int:
    """The stamp of the step whose stash this row reads from the relay: the last that samples it."""
    sequence = flight.sequence
    reads_relay = sequence.num_sampling > 0 or flight.num_drafts > 0
    return sequence.relay_stamp if reads_relay else 0


def _page_writes(sequences: list[Sequence], group: int) -> PageWrites:
    """Page table entries that the device does not have: all of a row that is new to it."""
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


def _stats(state: SchedulerState, flights: list[Flight], admitted: list[Sequence]) -> StepStats:
    new_rows = {sequence.row for sequence in admitted}
    prefills = [f for f in flights if f.is_prefill or f.sequence.row in new_rows]
    total = state.spec.groups[0].num_pages - 1
    return StepStats(
        num_prefill_rows=len(prefills),
        num_prefill_tokens=sum(flight.query_len for flight in prefills),
        num_decode_rows=len(flights) - len(prefills),
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_retracted=state.num_retracted,
        num_cached_tokens=sum(sequence.committed_len for sequence in admitted),
        used_pages=state.cache.num_used(0),
        total_pages=total,
    )
