"""A forecast of the pages that running rows will hold, so that admission avoids retractions.

A row that was retracted because the pool was full computes its tokens again. If it came back as
soon as there was room for one more step, the next few steps would retract it, or another, once
more. So each such retraction raises `SchedulerState.caution`, the number of tokens ahead for which
the pages of all rows must fit, and steps without one lower it slowly. Rows that reach max_tokens
within that time give back their pages, which counts; an end before max_tokens cannot be known.

The largest number of pages is needed where a row is about to end, or at the end of that time. With
the rows sorted by the tokens that they still have to make, those alive at such a moment stand
before all that have ended, so sums over the sorted rows give every moment at once.
"""

from __future__ import annotations

import numpy as np

from aserve.scheduling.ranks import rows_by_rank
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState

AHEAD_PER_RETRACTION = 8  # tokens
STEPS_PER_TOKEN = 4  # without a retraction, until caution falls by one token
MAX_AHEAD = 512  # tokens


def become_cautious(state: SchedulerState) -> None:
    """A row was retracted because the pool is full."""
    more = state.caution + AHEAD_PER_RETRACTION * STEPS_PER_TOKEN
    state.caution = min(more, MAX_AHEAD * STEPS_PER_TOKEN)


def relax(state: SchedulerState) -> None:
    """A step was launched."""
    state.caution = max(0, state.caution - 1)


def fits_ahead(state: SchedulerState, sequence: Sequence) -> bool:
    """Returns whether the sequence, whose prefix was opened, and all running rows of its rank have
    pages for as many tokens ahead as caution asks for. Only the first layer group is counted:
    windowed groups do not grow. Without caution the answer is yes.
    """
    if not state.caution:
        return True
    num_ahead = -(-state.caution // STEPS_PER_TOKEN)
    first = state.cache.pools_of(sequence.rank)[0]
    return _most_pages(state, sequence, num_ahead) <= state.cache.available(first)


def _most_pages(state: SchedulerState, sequence: Sequence, num_ahead: int) -> int:
    """Returns the largest number of pages, beside those that are held now, that is needed at any
    moment.
    """
    assert sequence.allocation is not None
    table, rows = state.table, [*rows_by_rank(state, state.running_rows)][sequence.rank]
    page_size, depth = state.spec.page_size, state.spec.depth
    lens = np.append(table.num_tokens[rows], sequence.tokens.num)
    held = np.append(table.num_pages[rows], sequence.allocation.num_pages)
    cached = np.append(table.cached_len[rows], max(sequence.cached_len, 0))
    own = held - cached // page_size
    # A row keeps its pages until the results of its last steps are back.
    left = np.append(table.max_kv_len[rows], sequence.max_kv_len) - lens + depth
    order = np.argsort(-left, kind="stable")
    moments = np.minimum(left[order], num_ahead)
    num_alive = np.arange(1, len(lens) + 1)
    grown = np.cumsum(lens[order]) + num_alive * (moments + page_size - 1)
    given_back = own.sum() - np.cumsum(own[order])
    # NOTE: at the end of the time nobody has ended who stands before the first to end within it.
    given_back[left[order] >= num_ahead] = own[left < num_ahead].sum()
    needed = grown // page_size - np.cumsum(held[order]) - given_back
    num_late = max(1, int((left >= num_ahead).sum()))
    return int(needed[num_late - 1 :].max())
