"""Steps that repeat the last one: the same rows, each with one token more.

Mostly nothing happens between two steps but tokens, and then most of a batch is as before, and its
result changes every row alike. So such a step is not chosen and built anew by `select` and
`launch`, which would do the same. A step repeats if nobody can be admitted, retracted or moved,
every row that can go on decodes one token, none is to draft, and pages abound. Rows that cannot go
on, because their last token is known or in flight, are left out. Its result is committed by
repeated_results.py.

What each step brings is known when the first one is launched: `Repeat` says for which steps, and
which rows begin or end a page in them. So a step costs a few numpy calls. `SchedulerState.repeat`
is the one that the next step may be of, and whatever else changes a row forgets it: another event
than a result, another launch, and a sequence that ends. This module writes it.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from aserve.messages.base import VALUE_BYTES, pack_i32
from aserve.messages.step import Launch, ScheduleBatch, StepStats, stamp_of
from aserve.scheduling.checkpoints import state_copies
from aserve.scheduling.clients import Client
from aserve.scheduling.flights import Repeat, new_step, send_alike
from aserve.scheduling.forecast import relax
from aserve.scheduling.loads import save_pages
from aserve.scheduling.ranks import max_decode_rows
from aserve.scheduling.rows import Column
from aserve.scheduling.select import grow, ready_rows
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.table_writes import page_writes

NO_ROWS = np.empty(0, np.int64)


def repeat_step(state: SchedulerState) -> bool:
    """Launches the step that repeats the last one, and returns True; or changes nothing, and
    returns False.
    """
    choice, repeat = state.draft_choice, state.repeat
    if len(state.steps) >= state.spec.lead or choice.is_drafting or not _is_undisturbed(state):
        return False
    if repeat is None or not _goes_on(state, repeat):
        repeat = state.repeat = _find_repeat(state)
    if repeat is None or (choice.is_on and not choice.holds(repeat.rows, state.running)):
        return False
    pools = range(state.cache.num_pools)
    if not all(state.cache.available(pool) >= repeat.most_pages for pool in pools):
        return False
    _launch(state, repeat)
    return True


def _goes_on(state: SchedulerState, repeat: Repeat) -> bool:
    """Returns whether the next step may be of this `Repeat`, as far as its rows go."""
    is_here = repeat.running is state.running_rows and repeat.spec is state.spec
    return is_here and state.next_iteration - repeat.first < repeat.num_launches


def _launch(state: SchedulerState, repeat: Repeat) -> None:
    table, rows, iteration = state.table, repeat.rows, state.next_iteration
    begins = repeat.fill_phase == (iteration - repeat.first) % state.spec.page_size
    grown = rows[begins] if np.count_nonzero(begins) else NO_ROWS
    if len(grown):
        grow(state, grown, repeat.kv_lens[begins] + 1)
    save_pages(state)
    relax(state)
    state.next_iteration += 1
    is_known, packed_rows = not state.steps, repeat.step.packed_rows
    step = msgspec.structs.replace(repeat.step, iteration=iteration, repeat=repeat)
    state.steps[iteration] = step
    stats = _stats(state, len(rows))
    stamp = 0 if is_known else stamp_of(iteration - 1)
    batch = ScheduleBatch(
        iteration=iteration,
        rows=packed_rows,
        query_lens=repeat.ones,
        input_ids=pack_i32(table.last_id[rows]) if is_known else repeat.minus_rows,
        next_ids=repeat.minus_rows,
        kv_lens=repeat.kv_lens.tobytes(),
        bounds=bytes(len(rows)),
        expects=stamp.to_bytes(VALUE_BYTES, "little") * len(rows),
        sample_rows=packed_rows,
        page_writes=page_writes(table, grown, num_groups=len(state.spec.groups)),
        states=state_copies(state, rows, repeat.kv_lens, repeat.step.query_lens),
        stats=stats,
        skips_drafter=state.draft_choice.note_launch(table, step, stats),
    )
    repeat.kv_lens += 1
    table.written_pages[grown] = table.num_pages[grown]
    send_alike(table, repeat.places, iteration=iteration, stamp=stamp_of(iteration))
    state.effects.append(Launch((batch,)))


def _stats(state: SchedulerState, num_rows: int) -> StepStats:
    return StepStats(
        num_decode_rows=num_rows,
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_retracted=state.num_retracted,
        used_pages=state.cache.num_used(0),
        total_pages=state.spec.total_pages,
    )


def _is_undisturbed(state: SchedulerState) -> bool:
    """Returns whether no step needs more than the rows that run."""
    if not state.running or state.masked or state.has_senders or state.is_recovering:
        return False
    if len(state.slow_waiting):
        return False
    return not state.waiting or (not state.rows.num_free and state.clients.num_active < 2)


def _find_repeat(state: SchedulerState) -> Repeat | None:
    """Returns what stays the same while the rows that can go on do so as they are, or None if they
    differ in more than their tokens.
    """
    spec, table, first = state.spec, state.table, state.next_iteration
    running, caps, page_size = state.running_rows, spec.decode, spec.page_size
    rows = ready_rows(state, running)
    num_rows = len(rows)
    if not num_rows or not _can_repeat(state, num_rows) or not _go_on_alike(state, rows):
        return None
    starts = table.scheduled_len[rows]
    num_left = table.num_pages[rows] * page_size - starts  # tokens until a page begins
    if np.count_nonzero(num_left >= page_size):
        return None
    step = new_step(table, rows, np.ones(num_rows, np.int64), iteration=0, caps=caps)
    if np.count_nonzero(step.samples) < num_rows or np.count_nonzero(step.num_drafts):
        return None
    clients: list[Client] = table.clients[rows].tolist()
    last_row = int(np.maximum.reduce(rows))
    is_one = state.clients.num_active == 1
    return Repeat(
        step,
        rows,
        running,
        spec,
        first=first,
        kv_lens=starts.astype(np.int32),
        positions=starts + 1 - table.max_len[rows] + table.max_tokens[rows],
        fill_phase=num_left,
        page_phase=(max(0, caps.key_lookahead - 1) - starts - 1) % page_size,
        num_launches=int(np.minimum.reduce(table.max_len[rows] - starts)) - 1,
        num_quiet=int(np.minimum.reduce(table.look_len[rows] - starts)) - 2,
        most_pages=state.num_pages(min(2 * num_rows, spec.max_batched_tokens)) + 2 * num_rows,
        ones=pack_i32(step.query_lens),
        minus_rows=pack_i32(-rows),
        places=slice(1, num_rows + 1) if last_row == num_rows else rows,
        request_ids=tuple(table.request_ids[rows].tolist()),
        children=pack_i32(table.child[rows]),
        cached_lens=pack_i32(table.cached_len[rows]),
        appends=table.appends[rows].tolist(),
        clients=[(clients[0], num_rows)] if is_one else list(Counter(clients).items()),
    )


def _can_repeat(state: SchedulerState, num_rows: int) -> bool:
    """Returns whether all rows may be in each step, and each of them decodes its last token, and
    brings the next one.
    """
    spec, caps = state.spec, state.spec.decode
    if spec.dp_size > 1 or spec.names_shared_pages or state.cache.has_windows:
        return False
    if (caps.root_len, caps.min_tokens_per_step, caps.block_len) != (1, 1, 1):
        return False
    most = max_decode_rows(spec, state.rows.num_taken_of(0))
    return num_rows <= min(most, spec.max_batched_tokens)


def _go_on_alike(state: SchedulerState, rows: Column) -> bool:
    """Returns whether each of the rows was in the last step, and has one token to compute, which is
    known if nothing is in flight.
    """
    table, last = state.table, state.next_iteration - 1
    num_sampling = table.num_sampling[rows]
    is_other = table.last_iteration[rows] != last
    is_other |= table.remaining[rows] != 1
    is_other |= (num_sampling > 0) != bool(state.steps)
    is_other |= table.num_uncertain[rows] != 0  # a window in flight
    is_other |= table.written_pages[rows] != table.num_pages[rows]  # the device lacks some
    is_other |= table.max_step_tokens[rows] - table.num_cut[rows] != 1  # it may draft
    is_other |= table.unpaid[rows] > table.scheduled_len[rows] - table.committed_len[rows]
    return not np.count_nonzero(is_other)
