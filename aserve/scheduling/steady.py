"""Launches a step that repeats the last one: the same rows, each with one token more.

Mostly nothing happens between two steps but tokens, and then most of a batch is as before. So it is
not chosen and built anew by `select` and `launch`, which would do the same. A step repeats if
nobody can be admitted, retracted or moved, every row decodes one token, none is to draft, and pages
abound.
Writes `SchedulerState.repeat`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from aserve.messages.base import pack_i32
from aserve.messages.executor import DecodeCaps
from aserve.messages.requests import stamp_of
from aserve.messages.step import Launch, ScheduleBatch, StepStats
from aserve.scheduling.flights import Repeat, plan_step, send
from aserve.scheduling.forecast import relax
from aserve.scheduling.loads import save_pages
from aserve.scheduling.ranks import max_decode_rows
from aserve.scheduling.rows import Column
from aserve.scheduling.select import grow
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.table_writes import page_writes


def repeat_step(state: SchedulerState) -> bool:
    """Launches the step that repeats the last one, and returns True; or changes nothing, and
    returns False.
    """
    if not _is_undisturbed(state):
        return False
    table, rows, choice = state.table, state.running_rows, state.draft_choice
    if choice.is_on and (choice.is_drafting or not choice.holds(rows, state.running)):
        return False
    num_sampling = table.num_sampling[rows]
    num_known = len(rows) - int(np.count_nonzero(num_sampling))
    is_last = table.num_tokens[rows] + num_sampling >= table.max_len[rows]
    if np.count_nonzero(is_last) or num_known not in (0, len(rows)):
        return False
    repeat = state.repeat
    if repeat is None or repeat.rows is not rows or repeat.spec is not state.spec:
        repeat = state.repeat = _find_repeat(state)
    if repeat is None or not _may_repeat(state, repeat):
        return False
    _launch(state, repeat, is_known=num_known > 0)
    return True


def _is_undisturbed(state: SchedulerState) -> bool:
    """Returns whether the rows that run are all that there is."""
    if not state.running or state.masked or state.has_senders or state.is_recovering:
        return False
    if len(state.slow_waiting):
        return False
    return not state.waiting or (not state.rows.num_free and state.clients.num_active < 2)


def _find_repeat(state: SchedulerState) -> Repeat | None:
    """Returns what would stay the same if the running rows went on as they are."""
    spec, rows, table = state.spec, state.running_rows, state.table
    num_rows, caps = len(rows), spec.decode
    if spec.dp_size > 1 or spec.names_shared_pages or not _is_plain(caps):
        return None
    if max_decode_rows(spec, state.rows.num_taken_of(0)) < num_rows:
        return None
    if num_rows > spec.max_batched_tokens:
        return None
    if (table.max_step_tokens[rows] - table.num_cut[rows] != 1).any():  # some may draft
        return None
    query_lens = np.ones(num_rows, np.int64)
    step = plan_step(table, rows, query_lens, iteration=0, caps=caps)
    if not step.samples.all() or step.num_drafts.any():
        return None
    most_pages = state.num_pages(min(2 * num_rows, spec.max_batched_tokens)) + 2 * num_rows
    return Repeat(
        step,
        rows,
        spec,
        query_lens=pack_i32(query_lens),
        minus_rows=pack_i32(-rows),
        bounds=bytes(num_rows),
        most_pages=most_pages,
    )


def _is_plain(caps: DecodeCaps) -> bool:
    """Returns whether a decode without drafts computes its last token, and brings the next one."""
    return (caps.root_len, caps.min_tokens_per_step, caps.block_len) == (1, 1, 1)


def _may_repeat(state: SchedulerState, repeat: Repeat) -> bool:
    """Returns whether every row was in the last step, has one token to compute and may do so, and
    whether there is ample room.
    """
    table, rows = state.table, repeat.rows
    is_other = table.last_iteration[rows] != state.next_iteration - 1
    is_other |= table.remaining[rows] != 1
    is_other |= table.num_sampling[rows] >= state.spec.lead
    is_other |= table.num_uncertain[rows] != 0  # a window in flight
    is_other |= table.written_pages[rows] == 0  # the device does not know the row any more
    if np.count_nonzero(is_other) or np.count_nonzero(table.is_blocked[rows]):
        return False
    pools = range(state.cache.num_pools)
    return all(state.cache.available(pool) >= repeat.most_pages for pool in pools)


def _launch(state: SchedulerState, repeat: Repeat, *, is_known: bool) -> None:
    table, rows, last = state.table, repeat.rows, repeat.step
    starts: Column = table.scheduled_len[rows]
    lacks_pages = starts >= table.num_pages[rows] * state.spec.page_size
    if np.count_nonzero(lacks_pages):
        grow(state, rows[lacks_pages], starts[lacks_pages] + 1)
    save_pages(state)
    relax(state)
    iteration = state.next_iteration
    state.next_iteration += 1
    step = state.steps[iteration] = msgspec.structs.replace(last, iteration=iteration)
    stats = _stats(state)
    grown = table.sequences[rows[table.written_pages[rows] != table.num_pages[rows]]].tolist()
    batch = ScheduleBatch(
        iteration=iteration,
        rows=last.packed_rows,
        query_lens=repeat.query_lens,
        input_ids=pack_i32(table.last_id[rows]) if is_known else repeat.minus_rows,
        next_ids=repeat.minus_rows,
        kv_lens=pack_i32(starts),
        bounds=repeat.bounds,
        expects=bytes(len(last.packed_rows)) if is_known else pack_i32(table.relay_stamp[rows]),
        sample_rows=last.packed_rows,
        page_writes=tuple(page_writes(grown, group) for group in range(len(state.spec.groups))),
        stats=stats,
        skips_drafter=state.draft_choice.note_launch(table, step, stats),
    )
    send(table, step, stamp=stamp_of(iteration))
    state.effects.append(Launch((batch,)))


def _stats(state: SchedulerState) -> StepStats:
    return StepStats(
        num_decode_rows=len(state.running),
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_retracted=state.num_retracted,
        used_pages=state.cache.num_used(0),
        total_pages=state.spec.total_pages,
    )
