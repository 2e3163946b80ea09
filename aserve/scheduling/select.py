"""Chooses the rows of the next step, and how many tokens of each it computes. Prefills, chunks,
decodes and verify windows differ in these numbers only. Pages are taken for what is chosen, and
rows are retracted before the pages run out.
"""

from __future__ import annotations

import functools

import numpy as np

from aserve.scheduling.admit import admit
from aserve.scheduling.blocks import min_query_len, min_query_lens, uncut_blocks, uncut_pictures
from aserve.scheduling.budget import (
    Pages,
    has_ample_room,
    has_room,
    next_query_lens,
    rank_has_room,
    spare_pages,
    step_need,
)
from aserve.scheduling.checkpoints import end_at_checkpoints
from aserve.scheduling.finish import finish_ended, retract, retraction_order
from aserve.scheduling.flights import NOTHING, Spans, rows_of
from aserve.scheduling.forecast import become_cautious
from aserve.scheduling.make_way import make_way
from aserve.scheduling.prefill_line import prefill_order
from aserve.scheduling.ranks import next_decodes, rows_by_rank, sequences_by_rank
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.rows import Column
from aserve.scheduling.state import SchedulerState

MOST_TIMES = 8  # factor by which the prefill-token cap of a mixed step grows at most


def select(state: SchedulerState) -> tuple[Spans, list[Sequence]]:
    """Returns the spans of the next step, decodes first, and the prefills that were admitted for
    it. Prefills come in the order of priority, then of what their clients were served, then of
    arrival.
    """
    _retract_for_room(state)
    owed = make_way(state)
    if state.is_recovering:
        chosen = _choose_retry(state)
        if len(chosen.rows) or state.is_recovering:
            return chosen, []
    decodes, prefills = _next_rows(state)
    by_rank = next_decodes(state, decodes)
    if state.draft_choice.is_on:
        state.draft_choice.choose(state.table, np.concatenate(by_rank), state.running)
    budget, mixes = state.spec.max_batched_tokens, state.spec.decode.mixes_prefill
    mixed = [_fill(state, own, budget) if mixes else NOTHING for own in by_rank]
    left = [budget - spans.num_tokens for spans in mixed]
    admitted = admit(state, prefills, num_tokens=left, owed=owed) if any(left) else []
    prefills += admitted
    prefills.sort(key=prefill_order)
    parts = zip(by_rank, mixed, sequences_by_rank(state, prefills), strict=True)
    first, *others = [_with_prefills(state, *part) for part in parts]
    return functools.reduce(Spans.join, others, first), admitted


def _with_prefills(
    state: SchedulerState, decodes: Column, chosen: Spans, prefills: list[Sequence]
) -> Spans:
    """Returns the spans of one rank: those of its decodes that were `chosen` for a mixed step, and
    its prefills as far as the budget goes. Without either, its decodes are chosen alone.
    """
    budget = state.spec.max_batched_tokens
    left = budget - chosen.num_tokens
    most = _most_beside(state, len(chosen.rows), len(prefills)) if len(chosen.rows) else left
    if prefills and min_query_len(prefills[0]) > min(left, most):
        chosen, left, most = NOTHING, budget, budget  # decodes wait: it is not cut into chunks
    if prefills:
        chosen = chosen.join(_fill(state, rows_of(prefills), min(left, most)))
    return chosen if len(chosen.rows) else _fill(state, decodes, budget)


def _next_rows(state: SchedulerState) -> tuple[Column, list[Sequence]]:
    """Returns the decodes, those that waited longest first, and the prefills, which the caller
    sorts.
    """
    table = state.table
    rows = ready_rows(state, state.running_rows)
    is_prefill = table.remaining[rows] > state.spec.decode.root_len
    decodes = rows[~is_prefill]
    decodes = decodes[table.last_iteration[decodes].argsort(kind="stable")]
    return decodes, [state.running[row] for row in rows[is_prefill].tolist()]


def ready_rows(state: SchedulerState, rows: Column) -> Column:
    """Returns the rows that another step may compute now, as far as their flights allow it. A row
    is left out if its outputs reach max_tokens, counting one for each sampling step in flight; or,
    where max_tokens is 0, if its whole prompt is in flight.
    """
    table = state.table
    num_sampling = table.num_sampling[rows]
    is_ready = (num_sampling < state.spec.lead) & (table.is_blocked[rows] == 0)
    is_last = table.num_tokens[rows] + num_sampling >= table.max_len[rows]
    is_ready &= ~is_last | (table.max_tokens[rows] == 0) & (table.remaining[rows] > 0)
    ready: Column = rows[is_ready]
    return ready


def _choose_retry(state: SchedulerState) -> Spans:
    """After a failed step, chooses the next group that still has something to run. It runs with
    nothing else in flight.
    """
    while state.retries and state.is_device_idle:
        group = [sequence for sequence in state.retries.pop(0) if sequence.phase is Phase.RUNNING]
        chosen = NOTHING
        for rows in rows_by_rank(state, ready_rows(state, rows_of(group))):
            chosen = chosen.join(_fill(state, rows, state.spec.max_batched_tokens))
        if len(chosen.rows):
            state.retry_iteration = state.next_iteration
            return chosen
    return NOTHING


def _most_beside(state: SchedulerState, num_decodes: int, num_prefills: int) -> int:
    """Returns the prefill-token cap of a mixed step, whose decodes all wait for the prefills. It
    grows when prefills outnumber decodes.
    """
    most = state.spec.max_mixed_prefill_tokens
    if most is None:
        return state.spec.max_batched_tokens
    return most * max(1, min(num_prefills // num_decodes, MOST_TIMES))


def _fill(state: SchedulerState, rows: Column, budget: int) -> Spans:
    """Chooses spans for rows of one rank, in their order, as far as the token budget and the pages
    go. A prefill takes what they allow; a decode that lacks a page is skipped in this step.
    """
    if not len(rows):
        return NOTHING
    table, page_size = state.table, state.spec.page_size
    remaining, starts = table.remaining[rows], table.scheduled_len[rows]
    query_lens = next_query_lens(state, rows)
    least = np.maximum(1, np.minimum(remaining, min_query_lens(state, rows)))
    if state.spec.decode.whole_windows:
        least = np.where(remaining > state.spec.decode.root_len, least, np.maximum(1, query_lens))
    lacks_pages = query_lens > table.num_pages[rows] * page_size - starts
    if np.add.reduce(query_lens) > budget:
        _cut(state, rows, query_lens, least=least, budget=budget)
    elif np.count_nonzero(lacks_pages) and not has_ample_room(state):
        lens = query_lens[lacks_pages]
        _cut(state, rows[lacks_pages], lens, least=least[lacks_pages], budget=budget)
        query_lens[lacks_pages] = lens
    elif np.count_nonzero(lacks_pages):
        lacks_pages &= query_lens >= least
        grow(state, rows[lacks_pages], (starts + query_lens)[lacks_pages])
    query_lens = uncut_blocks(query_lens, remaining, starts, state.spec.decode)
    query_lens = uncut_pictures(state, rows, query_lens)
    query_lens = end_at_checkpoints(state, rows, query_lens)
    is_chosen = query_lens >= least
    return Spans(rows[is_chosen], query_lens[is_chosen])


def grow(state: SchedulerState, rows: Column, ends: Column) -> None:
    """Takes the pages that rows of one rank lack up to these positions. There is ample room."""
    if not len(rows):
        return
    num_pages = -(-ends // state.spec.page_size)
    state.table.num_pages[rows] = num_pages
    allocations = [row.allocation for row in state.table.sequences[rows].tolist()]
    state.cache.of(allocations[0]).grow(allocations, num_pages.tolist())


def _cut(
    state: SchedulerState, rows: Column, query_lens: Column, *, least: Column, budget: int
) -> None:
    """Cuts the spans to the token budget and the pages, row by row, and takes the pages."""
    step_total: Pages | None = None
    # NOTE: with ample room, what this step leaves covers one more decode of every row.
    is_prefill = state.table.remaining[rows] > state.spec.decode.root_len
    if is_prefill.any() and not has_ample_room(state):
        step_total = step_need(state, state.running_rows)
    covered = state.table.num_pages[rows] * state.spec.page_size - state.table.scheduled_len[rows]
    for index, row in enumerate(rows.tolist()):
        query_len = min(int(query_lens[index]), budget)
        if query_len > covered[index]:
            query_len = _cover(state, state.running[row], query_len, step_total=step_total)
        query_lens[index] = query_len
        if query_len >= least[index]:
            budget -= query_len


def _cover(
    state: SchedulerState, sequence: Sequence, query_len: int, *, step_total: Pages | None
) -> int:
    """Takes the pages that the span lacks, as far as the row may. Returns how much of the span has
    pages.
    """
    assert sequence.allocation is not None
    start = sequence.scheduled_len
    covered = sequence.allocation.num_pages * state.spec.page_size - start
    if sequence.remaining > state.spec.decode.root_len:
        free = max(0, spare_pages(state, sequence, step_total=step_total))
    else:
        pools = state.cache.pools_of(sequence.rank)
        free = min([state.cache.available(pool) for pool in pools])
    query_len = min(query_len, covered + free * state.spec.page_size)
    if query_len >= min_query_len(sequence):
        cache = state.cache.of(sequence.allocation)
        cache.grow([sequence.allocation], [state.num_pages(start + query_len)])
        state.table.num_pages[sequence.row] = sequence.allocation.num_pages
    return query_len


def _retract_for_room(state: SchedulerState) -> None:
    """Retracts rows while fewer pages are free than one more step of all rows needs, but never the
    last row of a rank.
    """
    while len(state.running) > 1 and not has_ample_room(state):
        need = step_need(state, state.running_rows)
        if has_room(state, need):
            return
        if state.ended:
            finish_ended(state, most=1)
            continue
        by_rank = sequences_by_rank(state, state.retractable())
        crowded = [
            rows
            for rank, rows in enumerate(by_rank)
            if len(rows) > 1 and not rank_has_room(state, rank, need)
        ]
        if not crowded:
            return
        retract(state, max(crowded[0], key=retraction_order))
        become_cautious(state)
