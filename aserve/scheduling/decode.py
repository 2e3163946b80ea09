"""So many tokens for this row: chooses the rows and spans of one step. Prefill, chunk, decode
and verify window are one thing with different numbers. Takes pages for what it chose and
retracts before they run out; launches nothing.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec

from aserve.scheduling.admit import admit
from aserve.scheduling.board import Board
from aserve.scheduling.budget import (
    Pages,
    has_ample_room,
    has_room,
    next_span,
    spare_pages,
    step_need,
)
from aserve.scheduling.caps import max_decode_rows, may_run_ahead
from aserve.scheduling.leave import retract, retraction_order
from aserve.scheduling.phases import Phase
from aserve.scheduling.request import Sequence
from aserve.scheduling.shares import make_way, prefill_order

MOST_TIMES = 8  # the bound of prompts beside decodes, where these are few


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """One row's part in the next step. If the span reaches the last token that exists or is in
    flight, the row `samples`, or `ends` where nothing is to be sampled.
    """

    sequence: Sequence
    span: int
    num_drafts: int
    samples: bool
    is_prefill: bool
    ends: bool


def choose(board: Board) -> tuple[list[Chosen], list[Sequence]]:
    """The next step's rows, decodes first, and who was newly admitted for it. Prefills come in the
    order of priority, then of what their clients were served, then of arrival.
    """
    _retract_for_room(board)
    make_way(board)
    if board.is_recovering:
        chosen = _choose_retry(board)
        if chosen or board.is_recovering:
            return chosen, []
    decodes, prefills = _ready_rows(board, list(board.running.values()))
    decodes = decodes[: max_decode_rows(board.spec, len(board.running))]
    budget = board.spec.max_batched_tokens
    chosen = _fill(board, decodes, budget) if board.spec.decode.mixes_prefill else []
    left = budget - sum(choice.span for choice in chosen)
    admitted = admit(board, prefills, num_tokens=left) if left else []
    prefills += admitted
    prefills.sort(key=prefill_order)
    most = _most_beside(board, len(chosen), len(prefills)) if chosen else left
    chosen += _fill(board, prefills, min(left, most))
    return chosen or _fill(board, decodes, budget), admitted


def _ready_rows(board: Board, rows: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Decodes, who waited longest first; then prefills, which the caller sorts."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for row in rows:
        if may_run_ahead(row, lead=board.spec.lead):
            (decodes if row.remaining == 1 else prefills).append(row)
    decodes.sort(key=attrgetter("last_iteration"))
    return decodes, prefills


def _choose_retry(board: Board) -> list[Chosen]:
    """After a failed step: the next group that still has something to run, with nothing else in
    flight.
    """
    while board.retries and board.is_device_idle:
        group = [sequence for sequence in board.retries.pop(0) if sequence.phase is Phase.RUNNING]
        ready = [row for row in group if may_run_ahead(row, lead=board.spec.lead)]
        chosen = _fill(board, ready, board.spec.max_batched_tokens)
        if chosen:
            board.trial = board.next_iteration
            return chosen
    return []


def _most_beside(board: Board, num_decodes: int, num_prefills: int) -> int:
    """Tokens of prompts beside decodes, who all wait for them; where more rows wait to begin than
    go on, more times the bound."""
    most = board.spec.mixed_prompt_tokens
    if most is None:
        return board.spec.max_batched_tokens
    return most * max(1, min(num_prefills // num_decodes, MOST_TIMES))


def _fill(board: Board, rows: list[Sequence], budget: int) -> list[Chosen]:
    """Spans for rows, in order, as far as the token budget and the pages go."""
    chosen: list[Chosen] = []
    step_total: Pages | None = None
    # NOTE: with ample room, what this step leaves covers one more decode of every row.
    if not has_ample_room(board) and any(row.remaining > 1 for row in rows):
        step_total = step_need(board, board.running.values())
    for sequence in rows:
        choice = _choose_span(board, sequence, budget, step_total=step_total)
        if choice is not None:
            chosen.append(choice)
            budget -= choice.span
    return chosen


def _choose_span(
    board: Board, sequence: Sequence, budget: int, *, step_total: Pages | None
) -> Chosen | None:
    """A prefill takes what budget and pages allow; a decode that lacks a page is skipped in this
    step.
    """
    remaining = sequence.remaining
    span = min(next_span(board.spec, sequence), budget)
    span = _cover(board, sequence, span, step_total=step_total)
    if span < 1:
        return None
    is_whole = span >= remaining
    ends = is_whole and not sequence.max_tokens
    samples = is_whole and not ends
    return Chosen(sequence, span, max(0, span - remaining), samples, remaining > 1, ends)


def _cover(board: Board, sequence: Sequence, span: int, *, step_total: Pages | None) -> int:
    """Takes the pages that the span lacks, as far as the row may; the part of it that has pages."""
    assert sequence.holding is not None
    start = sequence.scheduled_len
    covered = sequence.holding.num_pages * board.spec.page_size - start
    if span <= covered:
        return span
    if sequence.remaining > 1:
        free = max(0, spare_pages(board, sequence, step_total=step_total))
    else:
        free = min(board.cache.available(group) for group in range(len(board.spec.groups)))
    span = min(span, covered + free * board.spec.page_size)
    if span > 0:
        board.cache.grow(sequence.holding, board.num_pages(start + span))
    return span


def _retract_for_room(board: Board) -> None:
    """Rows step back while free pages are fewer than one more step of all rows needs; never the
    last row.
    """
    while len(board.running) > 1 and not has_ample_room(board):
        if has_room(board, step_need(board, board.running.values())):
            return
        retract(board, max(board.running.values(), key=retraction_order))
