"""The token ids of a step's batch. A token that is not known yet is named by its row.

Everything here reads the columns as they were before the step was sent.
"""

from __future__ import annotations

import numpy as np

from aserve.scheduling.flights import Step
from aserve.scheduling.rows import Column, RowTable


def input_ids(table: RowTable, step: Step) -> Column:
    """Returns the id of each token of the step: its own if it is known, and -row for a token in
    flight and for drafts.
    """
    rows, starts = step.rows, table.scheduled_len[step.rows]
    num_known = np.where(table.num_sampling[rows] > 0, 0, table.num_tokens[rows] - starts)
    ids = (-rows).repeat(step.query_lens)
    if not np.count_nonzero(num_known):
        return ids
    offsets = step.query_lens.cumsum() - step.query_lens
    is_last = num_known == 1
    ids[offsets[is_last]] = table.last_id[rows[is_last]]
    for index in (num_known > 1).nonzero()[0].tolist():
        start, offset = int(starts[index]), int(offsets[index])
        known = step.sequences[index].tokens.span(start, start + int(step.query_lens[index]))
        ids[offset : offset + len(known)] = known
    return ids


def next_ids(table: RowTable, step: Step) -> Column:
    """Returns the id of the token after each span. After a middle chunk that is the next token of
    the prompt; else it is -row, because the token is not known yet, or never will be.
    """
    if step.is_plain or np.count_nonzero(step.samples) == len(step.rows):
        return -step.rows
    ends = table.scheduled_len[step.rows] + step.query_lens
    has_next = ~step.samples & (ends < table.num_tokens[step.rows])
    ids = -step.rows
    for index in has_next.nonzero()[0].tolist():
        ids[index] = step.sequences[index].tokens.at(int(ends[index]))
    return ids


def expected_stamps(table: RowTable, step: Step) -> Column:
    """Returns the stamp of the step whose stash each row reads from the relay, which is the last
    step that samples the row, or 0 if it reads nothing.
    """
    reads_relay = (table.num_sampling[step.rows] > 0) | (step.num_drafts > 0)
    return np.where(reads_relay, table.relay_stamp[step.rows], 0)
