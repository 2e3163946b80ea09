"""Decides which rows draft: a row whose drafts are mostly rejected decodes plainly for a while.

A window costs more than a plain decode, so it must give more. Each window adds to the row's doubt
what it lacks of `WORTHWHILE` accepted drafts, and takes off what it has beyond, down to a credit of
`MAX_CREDIT`. At `MAX_DOUBT` the row drafts nothing for `PAUSE` tokens. Then one window tries again,
and if that accepts too little as well, the next pause is twice as long. A row without doubt begins
anew.

Everything is counted in quarters of a draft. Written here: `doubt`, `num_pauses` and `drafts_from`
of the row table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aserve.messages.base import ArrayI32
from aserve.scheduling.rows import Column, RowTable

QUARTERS = 4  # of one draft
WORTHWHILE = 3  # 0.75 drafts: what a window costs more than a plain decode
MAX_DOUBT = 2 * WORTHWHILE
MAX_CREDIT = 4 * WORTHWHILE
PAUSE = 32  # tokens
MAX_PAUSES = 5  # 32 << 5 tokens


def note_windows(table: RowTable, rows: Column, num_drafts: Column, num_outputs: ArrayI32) -> None:
    """Counts the results of a step, which are in `num_tokens` already. Rows without drafts, and
    windows that gave nothing, do not count.
    """
    is_window = (num_drafts > 0) & (num_outputs > 0)
    if not is_window.any():
        return
    own = rows[is_window]
    lacks = WORTHWHILE - QUARTERS * (num_outputs[is_window].astype(np.int64) - 1)
    doubt = np.maximum(table.doubt[own] + lacks, -MAX_CREDIT)
    is_over = doubt >= MAX_DOUBT
    num_pauses = np.where(doubt <= 0, 0, table.num_pauses[own])
    paused_until = table.num_tokens[own] + (PAUSE << num_pauses)
    table.drafts_from[own] = np.where(is_over, paused_until, table.drafts_from[own])
    table.num_pauses[own] = np.where(is_over, np.minimum(num_pauses + 1, MAX_PAUSES), num_pauses)
    table.doubt[own] = np.where(is_over, MAX_DOUBT - WORTHWHILE, doubt)


def is_drafting(table: RowTable, rows: Column) -> npt.NDArray[np.bool_]:
    """Returns which rows are not in a pause, and have a drafter that knows all their tokens."""
    is_on: npt.NDArray[np.bool_] = table.num_tokens[rows] >= table.drafts_from[rows]
    is_on &= table.num_skipped[rows] == 0
    return is_on


def whole_windows(table: RowTable, rows: Column, wanted: Column, room: Column) -> Column:
    """Returns how many tokens each row computes next if windows are whole: a window without room
    becomes a plain decode. While it is not certain how much room there is, that is 0.
    """
    alone = np.where(table.num_uncertain[rows] > 0, 0, table.remaining[rows])
    return np.minimum(np.where(wanted > room, alone, wanted), room)
