"""Turns the chosen spans into one `ScheduleBatch`, which tells the device about the step in host
values, and puts the step in flight.

Writes `SchedulerState.steps`, `SchedulerState.next_iteration` and `SchedulerState.repeat` (out).
"""

from __future__ import annotations

import numpy as np

from aserve.cache.allocation import num_shared_pages
from aserve.messages.base import pack_i32
from aserve.messages.step import Launch, ScheduleBatch, StepStats, VerifyPlan, stamp_of
from aserve.scheduling.advance import stream_kv
from aserve.scheduling.checkpoints import state_copies
from aserve.scheduling.flights import Step, new_step, send
from aserve.scheduling.forecast import relax
from aserve.scheduling.grammar_rows import ask_mask, held_flights
from aserve.scheduling.input_ids import expected_stamps, input_ids, next_ids
from aserve.scheduling.ranks import step_parts
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column, Objects
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.table_writes import page_writes, row_inits


def launch(
    state: SchedulerState, rows: Column, query_lens: Column, *, admitted: list[Sequence]
) -> None:
    """Builds the batches from the state before this step, then puts the step in flight."""
    table, iteration, state.repeat = state.table, state.next_iteration, None
    state.next_iteration += 1
    relax(state)
    step = new_step(table, rows, query_lens, iteration=iteration, caps=state.spec.decode)
    stats = _stats(state, step, admitted)
    skips_drafter = state.draft_choice.note_launch(table, step, stats)
    first, *others = step_parts(state, step)
    batches = (
        _build(state, first, stats=stats, skips_drafter=skips_drafter),
        *(_build(state, part, stats=StepStats(), skips_drafter=skips_drafter) for part in others),
    )
    state.steps[iteration] = step
    stream_kv(state, step)
    send(table, step, stamp=stamp_of(iteration))
    for index in held_flights(state, step).nonzero()[0].tolist() if state.masked else ():
        step.sequences[index].is_blocked = True
        state.held[step.sequences[index].row] = step
        ask_mask(state, step.sequences[index])
    state.effects.append(Launch(batches))


def _build(
    state: SchedulerState, step: Step, *, stats: StepStats, skips_drafter: bool
) -> ScheduleBatch:
    table, rows = state.table, step.rows
    is_sampled, held_rows = step.samples, b""
    if state.masked:
        is_held = held_flights(state, step)
        is_sampled, held_rows = is_sampled & ~is_held, pack_i32(rows[is_held])
    are_all = np.count_nonzero(is_sampled) == len(rows)
    grown = rows[table.written_pages[rows] != table.num_pages[rows]]
    verify = None
    if not step.is_plain and np.count_nonzero(step.num_drafts):
        verify = VerifyPlan(pack_i32(step.num_drafts), state.spec.decode.tree)
    return ScheduleBatch(
        iteration=step.iteration,
        rows=step.packed_rows,
        query_lens=pack_i32(step.query_lens),
        input_ids=pack_i32(input_ids(table, step)),
        next_ids=pack_i32(next_ids(table, step)),
        kv_lens=pack_i32(table.scheduled_len[rows]),
        bounds=(table.num_uncertain[rows] > 0).tobytes(),
        expects=pack_i32(expected_stamps(table, step)),
        sample_rows=step.packed_rows if are_all else pack_i32(rows[is_sampled]),
        held_rows=held_rows,
        page_writes=page_writes(table, grown, num_groups=len(state.spec.groups)),
        row_inits=row_inits(table.sequences[grown[table.written_pages[grown] == 0]].tolist()),
        verify=verify,
        states=state_copies(state, rows, table.scheduled_len[rows], step.query_lens),
        stats=stats,
        shared_pages=_shared_pages(step.sequences) if state.spec.names_shared_pages else 0,
        skips_drafter=skips_drafter,
    )


def _shared_pages(sequences: Objects) -> int:
    return num_shared_pages([row.allocation for row in sequences if row.allocation is not None])


def _stats(state: SchedulerState, step: Step, admitted: list[Sequence]) -> StepStats:
    is_prefill = state.table.remaining[step.rows] > state.spec.decode.root_len
    if any(sequence.remaining <= state.spec.decode.root_len for sequence in admitted):
        is_new = np.zeros(state.spec.max_rows + 1, np.bool_)
        is_new[[sequence.row for sequence in admitted]] = True
        is_prefill |= is_new[step.rows]
    num_prefill_rows = int(np.count_nonzero(is_prefill))
    return StepStats(
        num_prefill_rows=num_prefill_rows,
        num_prefill_tokens=sum(step.query_lens[is_prefill].tolist()),
        num_decode_rows=len(step.rows) - num_prefill_rows,
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_retracted=state.num_retracted,
        num_cached_tokens=sum(sequence.committed_len for sequence in admitted),
        used_pages=state.cache.num_used(0),
        total_pages=state.spec.total_pages,
    )
