"""Counts the pages that rows need. Nothing here changes the state."""

from __future__ import annotations

import itertools
from operator import add

import numpy as np

from aserve.scheduling.blocks import min_query_len, min_query_lens
from aserve.scheduling.draft_length import is_drafting, whole_windows
from aserve.scheduling.ranks import rows_by_rank
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column
from aserve.scheduling.state import SchedulerState

Pages = tuple[int, ...]  # one number per layer group, or per pool (rank_caches.py)


def most_pages(state: SchedulerState, num_positions: int) -> Pages:
    """Pages per group that a sequence alone holds at most when it covers `num_positions`.

    A windowed group holds the window, the page that it enters and the page that it leaves.
    """
    whole = state.num_pages(num_positions)
    if not state.cache.has_windows:
        return (whole,) * len(state.spec.groups)
    return tuple(
        whole if group.window is None else min(whole, state.num_pages(group.window) + 2)
        for group in state.spec.groups
    )


def next_query_lens(state: SchedulerState, rows: Column) -> Column:
    """Returns how many tokens each row would like to have in its next step: the rest of a prefill,
    or a decode with its drafts. It is 0 where a verify window or a block has no room left within
    `max_kv_len` positions, so that results must come first.
    """
    table, caps = state.table, state.spec.decode
    wanted = table.remaining[rows]
    room = table.max_kv_len[rows] - table.scheduled_len[rows]
    most = table.max_step_tokens[rows]
    if has_more := np.count_nonzero(most > caps.root_len) > 0:
        most -= table.num_cut[rows]
        most -= table.scheduled_len[rows] % caps.block_len * (table.num_uncertain[rows] == 0)
        has_more = np.count_nonzero(most > caps.root_len) > 0
    if has_more:
        may_draft = wanted == caps.root_len
        if not caps.min_tokens_per_step:
            # WHY: a mask is for an output position, which then may meet drafts more than once.
            may_draft &= table.has_mask[rows] == 0
        if caps.root_len:
            # It depends on the steps in flight when a pause begins, and whole windows must not.
            is_on = is_drafting(table, rows) | caps.whole_windows
            may_draft &= (table.relay_stamp[rows] != 0) & is_on
        wanted[may_draft] = most[may_draft]
    if caps.whole_windows:
        return whole_windows(table, rows, wanted.clip(max=state.spec.max_batched_tokens), room)
    query_lens: Column = np.minimum(wanted, room)
    return query_lens


def step_need(state: SchedulerState, rows: Column) -> Pages:
    """Pages that one more step of these rows takes from each pool."""
    needs = [_step_need_of_rank(state, own) for own in rows_by_rank(state, rows)]
    return needs[0] if len(needs) == 1 else tuple(itertools.chain.from_iterable(needs))


def _step_need_of_rank(state: SchedulerState, rows: Column) -> Pages:
    """Pages per layer group. Prefills share the step's token budget. In a windowed group a prefill
    gets by with one page, since its chunks shrink to that, and a row with something in flight can
    wait: what comes back frees pages.
    """
    table = state.table
    query_lens = np.maximum(1, next_query_lens(state, rows))
    is_prefill = table.remaining[rows] > state.spec.decode.root_len
    num_tokens = np.where(is_prefill, query_lens, 0)
    tokens_left = state.spec.max_batched_tokens - (np.cumsum(num_tokens) - num_tokens)
    query_lens = np.where(
        is_prefill, np.minimum(query_lens, np.maximum(1, tokens_left)), query_lens
    )
    covered = np.minimum(table.scheduled_len[rows] + query_lens, table.max_kv_len[rows])
    missing = _num_missing(state, rows, covered)
    least = -(-min_query_lens(state, rows) // state.spec.page_size)
    most = np.where(is_prefill, np.minimum(missing, least), missing)
    most[table.num_flights[rows] > 0] = 0
    return tuple(
        int((missing if group.window is None else most).sum()) for group in state.spec.groups
    )


def prefill_need(state: SchedulerState, sequence: Sequence) -> Pages:
    """Pages that a sequence, whose prefix was opened, still takes from each pool for its whole
    prefill and one more step.

    NOTE: never less than step_need says, else a row could be admitted that the next step retracts.
    """
    assert sequence.allocation is not None
    ahead = sequence.scheduled_len + sequence.remaining + sequence.max_step_tokens
    covered = min(ahead, sequence.max_kv_len)
    count = max(0, state.num_pages(covered) - sequence.allocation.num_pages)
    if not state.cache.has_windows:
        return state.cache.in_pools(sequence.rank, (count,) * len(state.spec.groups))
    least = state.num_pages(min_query_len(sequence))
    need = tuple(min(count, max(least, pages)) for pages in most_pages(state, covered))
    return state.cache.in_pools(sequence.rank, need)


def prefill_needs(state: SchedulerState, rows: Column) -> Pages:
    """Returns the sum of `prefill_need` of these rows."""
    needs = [_prefill_needs_of_rank(state, own) for own in rows_by_rank(state, rows)]
    return needs[0] if len(needs) == 1 else tuple(itertools.chain.from_iterable(needs))


def _prefill_needs_of_rank(state: SchedulerState, rows: Column) -> Pages:
    """Pages per layer group."""
    if not len(rows):
        return (0,) * len(state.spec.groups)
    table = state.table
    ahead = table.scheduled_len[rows] + table.remaining[rows] + table.max_step_tokens[rows]
    missing = _num_missing(state, rows, np.minimum(ahead, table.max_kv_len[rows]))
    least = -(-min_query_lens(state, rows) // state.spec.page_size)
    total: list[int] = []
    for group in state.spec.groups:
        most = missing
        if group.window is not None:
            most = np.minimum(missing, np.maximum(least, state.num_pages(group.window) + 2))
        total.append(int(most.sum()))
    return tuple(total)


def _num_missing(state: SchedulerState, rows: Column, num_positions: Column) -> Column:
    """Page indices that each row lacks to cover so many positions."""
    missing: Column = -(-num_positions // state.spec.page_size) - state.table.num_pages[rows]
    return np.maximum(missing, 0)


def spare_pages(state: SchedulerState, sequence: Sequence, *, step_total: Pages | None) -> int:
    """Pages that a prefill may take in every group of its rank, so that all other rows can still
    take one more step; `step_total` is what one more step of all running rows needs, None with
    ample room.
    """
    if step_total is None:
        return state.num_pages(state.spec.max_batched_tokens) + 1
    own = step_need(state, np.array([sequence.row]))
    return min(
        state.cache.available(pool) - max(0, step_total[pool] - own[pool])
        for pool in state.cache.pools_of(sequence.rank)
    )


def has_room(state: SchedulerState, need: Pages) -> bool:
    return all(state.cache.available(pool) >= pages for pool, pages in enumerate(need))


def rank_has_room(state: SchedulerState, rank: int, need: Pages) -> bool:
    pools = state.cache.pools_of(rank)
    return all(state.cache.available(pool) >= need[pool] for pool in pools)


def has_ample_room(state: SchedulerState) -> bool:
    """Returns whether there are more pages than a step of any rows could take, beside those of one
    more decode of every row. Mostly there are even for a step of `max_batched_tokens`, and then
    nobody has to count.
    """
    num_rows, most = len(state.running), state.table.most_step_tokens
    num_free = min([state.cache.available(pool) for pool in range(state.cache.num_pools)])
    num_free -= num_rows * (1 + state.num_pages(most))
    if num_free >= state.num_pages(state.spec.max_batched_tokens):
        return True
    return num_free >= state.num_pages(int(np.add.reduce(state.table.remaining)) + num_rows * most)


def add_pages(left: Pages, right: Pages) -> Pages:
    return tuple(map(add, left, right))
