"""Advances the committed lengths of rows whose results came. On the way clients are charged for
their prompts, whole pages enter the prefix tree, and pages behind a window are released.
"""

from __future__ import annotations

import numpy as np

from aserve.messages.transfers import SendKv, StreamKv
from aserve.scheduling.flights import Step, land
from aserve.scheduling.followers import lead, wake
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column, Objects
from aserve.scheduling.state import SchedulerState


def advance_rows(state: SchedulerState, step: Step, *, advance: Column) -> None:
    """Commits `advance` positions of each flight of a step, or of a part of it. Their sequences
    have their rows.
    """
    table, rows, page_size = state.table, step.rows, state.spec.page_size
    for index in table.unpaid[rows].nonzero()[0].tolist():
        _charge_prompt(step.sequences[index], int(advance[index]))
    before = table.committed_len[rows]
    land(table, step, advance=advance)
    if state.has_senders:
        _send_kv(state, step.sequences)
    if state.spec.prefix_cache:
        num_before = (before - state.spec.decode.key_lookahead) // page_size
        has_new_pages = (before + advance) // page_size > num_before  # at most
        if np.count_nonzero(has_new_pages):
            commit_pages(state, rows[has_new_pages])
    if state.cache.has_windows:
        for sequence in step.sequences:
            assert sequence.allocation is not None
            cache = state.cache.of(sequence.allocation)
            cache.release_behind(sequence.allocation, sequence.committed_len)


def commit_pages(state: SchedulerState, rows: Column) -> None:
    """Enters the whole pages of rows into the prefix tree, and wakes who waited for them."""
    page_size, caches = state.spec.page_size, state.cache.ranks
    sequences: list[Sequence] = state.table.sequences[rows].tolist()
    for sequence, num_pages in zip(sequences, _num_cacheable(state, rows), strict=True):
        allocation, keys = sequence.allocation, sequence.page_keys(page_size)
        assert allocation is not None
        caches[allocation.rank].commit(allocation, keys, num_pages=num_pages)
        if sequence.next_key is not None or num_pages < len(keys):
            lead(state, sequence, num_committed=num_pages)
        if sequence.followers:
            wake(state, sequence)


def _num_cacheable(state: SchedulerState, rows: Column) -> list[int]:
    """Returns the whole pages of each row's `cacheable_len`."""
    table, caps, page_size = state.table, state.spec.decode, state.spec.page_size
    if caps.block_len > 1:
        return [row.cacheable_len // page_size for row in table.sequences[rows].tolist()]
    num_known = table.num_tokens[rows] - caps.key_lookahead
    lens = np.minimum(table.committed_len[rows], num_known) * (table.whole_len[rows] == 0)
    num_pages: list[int] = (np.maximum(lens, 0) // page_size).tolist()
    return num_pages


def _send_kv(state: SchedulerState, sequences: Objects) -> None:
    for sequence in sequences:
        if sequence.sends_kv and sequence.allocation is not None:
            pages = sequence.allocation.packed()
            state.effects.append(SendKv(sequence.request_id, sequence.committed_len, pages))


def stream_kv(state: SchedulerState, step: Step) -> None:
    """Announces the KV that a step will compute for other engines, before it is in flight."""
    if not state.has_senders:
        return
    starts = state.table.scheduled_len[step.rows].tolist()
    for sequence, first, num in zip(step.sequences, starts, step.query_lens.tolist(), strict=True):
        if sequence.sends_kv and sequence.allocation is not None:
            pages = sequence.allocation.packed()
            state.effects.append(
                StreamKv(sequence.request_id, step.iteration, first, first + num, pages)
            )


def _charge_prompt(sequence: Sequence, num_computed: int) -> None:
    """Charges the client for prompt tokens, each once: a retracted prompt is computed again without
    charge.
    """
    num_charged = min(sequence.unpaid, num_computed)
    sequence.unpaid -= num_charged
    sequence.client.serve_prompt(num_charged)
