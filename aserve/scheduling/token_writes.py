"""Writes the tokens of a step into the logs of their sequences and the columns of their rows.
commit.py alone calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from aserve.messages.base import ArrayI32, num_values
from aserve.messages.output import SequenceOutput
from aserve.scheduling.flights import Step
from aserve.scheduling.rows import Column
from aserve.scheduling.state import SchedulerState


def write_columns(
    state: SchedulerState, step: Step, num_kept: ArrayI32, *, last_ids: ArrayI32
) -> Column:
    """Counts the tokens that the rows of a step, or of a part of it, have kept, and returns the
    number of positions whose KV each flight commits. The sequences have their rows.
    """
    table, rows = state.table, step.rows
    table.num_tokens[rows] += num_kept
    if np.count_nonzero(num_kept) == len(rows):
        table.last_id[rows] = last_ids
        if step.is_plain:
            return step.max_advance
    else:
        has_tokens = num_kept > 0
        table.last_id[rows[has_tokens]] = last_ids[has_tokens]
    if np.count_nonzero(step.num_drafts):
        num_drafts = step.num_drafts * state.spec.decode.root_len  # a block has no drafts
        state.draft_choice.note_results(table, rows, num_drafts, num_kept)
    if np.count_nonzero(step.num_uncertain) or np.count_nonzero(num_kept != step.max_outputs):
        return step.max_advance - step.max_outputs + num_kept
    return step.max_advance  # nothing else could come


def last_kept(tokens: ArrayI32, counts: ArrayI32, num_kept: ArrayI32) -> ArrayI32:
    """Returns the last token that each row keeps of its `counts`. Of a row that keeps none it has
    no meaning.
    """
    last_ids: ArrayI32 = np.append(tokens, np.int32(0))[counts.cumsum() - counts + num_kept - 1]
    return last_ids


def append_columns(state: SchedulerState, rows: Column, token_ids: ArrayI32) -> None:
    """Appends one token to the log of each row."""
    table = state.table
    for append, token_id in zip(table.appends[rows].tolist(), token_ids.tolist(), strict=True):
        append(token_id)
    if state.clients.num_active == 1:
        table.clients[rows[0]].serve_outputs(len(rows))
        return
    for client, num_tokens in Counter(table.clients[rows].tolist()).items():
        client.serve_outputs(num_tokens)


def append_outputs(
    step: Step, outputs: dict[int, SequenceOutput | None], indices: Iterable[int]
) -> None:
    """Appends these of the outputs, which are by index, to the logs of their sequences."""
    for index in indices:
        sequence, output = step.sequences[index], outputs[index]
        if output is not None:
            sequence.tokens.outputs.frombytes(output.token_ids)
            sequence.client.serve_outputs(num_values(output.token_ids))
