"""Chooses the rows of the next step, and how many tokens of each it computes. Prefills, chunks,
decodes and verify windows differ in these numbers only. Pages are taken for what is chosen, and
rows are retracted before the pages run out.
"""

from __future__ import annotations

from operator import attrgetter

from aserve.messages.executor import EngineSpec
from aserve.scheduling.admit import admit, prefill_order
from aserve.scheduling.budget import (
    Pages,
    has_ample_room,
    has_room,
    min_query_len,
    next_query_len,
    spare_pages,
    step_need,
)
from aserve.scheduling.finish import finish_ended, retract, retraction_order
from aserve.scheduling.forecast import become_cautious
from aserve.scheduling.make_way import make_way
from aserve.scheduling.request import Flight, Phase, Sequence
from aserve.scheduling.state import SchedulerState

MOST_TIMES = 8  # factor by which the prefill-token cap of a mixed step grows at most


def select(state: SchedulerState) -> tuple[list[Flight], list[Sequence]]:
    """Returns the flights of the next step, decodes first, and the prefills that were admitted for
    it. Prefills come in the order of priority, then of what their clients were served, then of
    arrival.
    """
    _retract_for_room(state)
    owed = make_way(state)
    if state.is_recovering:
        chosen = _choose_retry(state)
        if chosen or state.is_recovering:
            return chosen, []
    decodes, prefills = _ready_rows(state, list(state.running.values()))
    decodes = decodes[: max_decode_rows(state.spec, len(state.running))]
    budget = state.spec.max_batched_tokens
    chosen = _fill(state, decodes, budget) if state.spec.decode.mixes_prefill else []
    left = budget - sum(flight.query_len for flight in chosen)
    admitted = admit(state, prefills, num_tokens=left, owed=owed) if left else []
    prefills += admitted
    prefills.sort(key=prefill_order)
    most = _most_beside(state, len(chosen), len(prefills)) if chosen else left
    if prefills and min_query_len(prefills[0]) > min(left, most):
        chosen, left, most = [], budget, budget  # decodes wait: it is not cut into chunks
    chosen += _fill(state, prefills, min(left, most))
    return chosen or _fill(state, decodes, budget), admitted


def _ready_rows(
    state: SchedulerState, rows: list[Sequence]
) -> tuple[list[Sequence], list[Sequence]]:
    """Returns the decodes, those that waited longest first, and the prefills, which the caller
    sorts.
    """
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    root_len = state.spec.decode.root_len
    for row in rows:
        if may_run_ahead(row, lead=state.spec.lead):
            (prefills if row.remaining > root_len else decodes).append(row)
    decodes.sort(key=attrgetter("last_iteration"))
    return decodes, prefills


def _choose_retry(state: SchedulerState) -> list[Flight]:
    """After a failed step, chooses the next group that still has something to run. It runs with
    nothing else in flight.
    """
    while state.retries and state.is_device_idle:
        group = [sequence for sequence in state.retries.pop(0) if sequence.phase is Phase.RUNNING]
        ready = [row for row in group if may_run_ahead(row, lead=state.spec.lead)]
        chosen = _fill(state, ready, state.spec.max_batched_tokens)
        if chosen:
            state.retry_iteration = state.next_iteration
            return chosen
    return []


def _most_beside(state: SchedulerState, num_decodes: int, num_prefills: int) -> int:
    """The prefill-token cap of a mixed step, whose decodes all wait for the prefills. It grows when
    prefills outnumber decodes.
    """
    most = state.spec.max_mixed_prefill_tokens
    if most is None:
        return state.spec.max_batched_tokens
    return most * max(1, min(num_prefills // num_decodes, MOST_TIMES))


def _fill(state: SchedulerState, rows: list[Sequence], budget: int) -> list[Flight]:
    """Chooses flights for rows, in their order, as far as the token budget and the pages go."""
    chosen: list[Flight] = []
    step_total: Pages | None = None
    # NOTE: with ample room, what this step leaves covers one more decode of every row.
    root_len = state.spec.decode.root_len
    if not has_ample_room(state) and any(row.remaining > root_len for row in rows):
        step_total = step_need(state, state.running.values())
    for sequence in rows:
        flight = _choose_span(state, sequence, budget, step_total=step_total)
        if flight is not None:
            chosen.append(flight)
            budget -= flight.query_len
    return chosen


def _choose_span(
    state: SchedulerState, sequence: Sequence, budget: int, *, step_total: Pages | None
) -> Flight | None:
    """A prefill takes what budget and pages allow; a decode that lacks a page is skipped in this
    step.
    """
    assert sequence.allocation is not None
    remaining = sequence.remaining
    query_len = next_query_len(state.spec, sequence)
    if query_len > budget:
        query_len = budget
    num_covered = sequence.allocation.num_pages * state.spec.page_size - sequence.scheduled_len
    if query_len > num_covered:
        query_len = _cover(state, sequence, query_len, step_total=step_total)
    if query_len < 1 or (query_len < remaining and query_len < min_query_len(sequence)):
        return None
    caps = state.spec.decode
    is_whole = query_len >= remaining
    num_drafts = num_accepted = query_len - remaining if is_whole else 0
    if num_drafts and caps.tree is not None:
        num_accepted = caps.tree.depth(num_drafts)
    max_outputs = num_accepted + caps.root_len if is_whole and sequence.max_tokens else 0
    samples, least = max_outputs > 0, caps.min_tokens_per_step
    return Flight(
        sequence,
        iteration=state.next_iteration,
        query_len=query_len,
        num_drafts=num_drafts,
        max_advance=query_len - num_drafts + num_accepted,
        max_outputs=max_outputs,
        num_uncertain=max_outputs - least if max_outputs > least else 0,
        samples=samples,
        ends=is_whole and not sequence.max_tokens,
        is_prefill=remaining > caps.root_len,
        is_held=samples and sequence.mask is not None,
    )


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
        free = min(state.cache.available(group) for group in range(len(state.spec.groups)))
    query_len = min(query_len, covered + free * state.spec.page_size)
    if query_len >= min_query_len(sequence):
        state.cache.grow(sequence.allocation, state.num_pages(start + query_len))
    return query_len


def _retract_for_room(state: SchedulerState) -> None:
    """Retracts rows while fewer pages are free than one more step of all rows needs, but never the
    last row.
    """
    while len(state.running) > 1 and not has_ample_room(state):
        if has_room(state, step_need(state, state.running.values())):
            return
        if state.ended:
            finish_ended(state, most=1)
            continue
        rows = state.retractable()
        if len(rows) < 2:
            return
        retract(state, max(rows, key=retraction_order))
        become_cautious(state)


def max_decode_rows(spec: EngineSpec, num_running: int) -> int:
    """The maximum number of decode rows in one step. With lead < depth (a pipeline) the rows are
    spread over the steps in flight.
    """
    return -(-num_running * spec.lead // spec.depth)


def may_run_ahead(sequence: Sequence, *, lead: int) -> bool:
    """Whether another step may compute this row now, as far as its flights allow it."""
    if sequence.num_sampling >= lead or sequence.is_at_end or sequence.awaits_kv:
        return False
    return sequence.mask is None or not sequence.is_held


def waits_for_masks(spec: EngineSpec, *, num_in_flight: int, has_held_rows: bool) -> bool:
    """A launch waits for held rows' masks while another step keeps the device busy, never
    longer.
    """
    return spec.lead == spec.depth and has_held_rows and num_in_flight > 0
