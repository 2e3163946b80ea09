"""Which checkpoints of recurrent states are taken, and which are read.

A checkpoint lets another sequence begin at its position (cache/state_cache.py), and costs a copy of
megabytes, and a page of its pool. So few are taken, at ends of pages:

- at the last whole page of a prompt, for its next turn, and for equal prompts;
- where prompts part: at the end of the pages that a prompt shares with one that is cached, or with
  one that is computed now, if there is no checkpoint yet. The next prompt like these begins there;
- at ends of chunks, each at least an eighth of its position behind the one before;
- while outputs are decoded, an interval behind the last one. Of these only the newest is kept.

A prefill is cut at the first two, because a step leaves the states of its last tokens only. If no
page is free, and none can be given up, a sequence goes on without a checkpoint. A row with drafts
takes none, because the host does not know where its step ends. A row that is new to the device, or
whose flights were dropped, begins where its prefix ends, and reads the checkpoint there.
"""

from __future__ import annotations

from collections.abc import Sequence as Keys

from aserve.cache.allocation import PageAllocation
from aserve.cache.state_cache import states_of
from aserve.messages.base import ArrayI32, pack_i32
from aserve.messages.step import StateCopies
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column
from aserve.scheduling.state import SchedulerState

PARTS = 4  # of the interval; a prompt takes its checkpoints at least one part behind the last
PARTS_OF_LEN = 8  # of a position; a chunk takes one at its end if none is within the last part


def end_at_checkpoints(state: SchedulerState, rows: Column, query_lens: Column) -> Column:
    """Returns the spans of a step, where each prefill ends at its next checkpoint, or a chunk at
    the end of a page."""
    cache, table = state.cache.states, state.table
    if cache is None or not cache.checkpoints.num_available:
        return query_lens
    is_prefill = (table.remaining[rows] > 1) & (query_lens > 1) & (table.whole_len[rows] == 0)
    for index in is_prefill.nonzero()[0].tolist():
        sequence = table.sequences[rows[index]]
        query_lens[index] = _span(state, sequence, int(query_lens[index]))
    return query_lens


def _span(state: SchedulerState, sequence: Sequence, query_len: int) -> int:
    start, page_size = sequence.scheduled_len, state.spec.page_size
    end = start + query_len
    for target in _targets(state, sequence):
        if start < target < end:
            return target - start
    whole = end // page_size * page_size
    return whole - start if query_len < sequence.remaining and whole > start else query_len


def _targets(state: SchedulerState, sequence: Sequence) -> list[int]:
    """Returns the positions at which a prompt wants checkpoints, in ascending order."""
    states, page_size = states_of(_allocation(sequence)), state.spec.page_size
    num_tokens = sequence.scheduled_len + sequence.remaining
    wanted = (states.branch_len, (num_tokens - 1) // page_size * page_size)
    least = _last_len(state, sequence) + state.spec.checkpoint_interval // PARTS
    return [position for position in wanted if position >= least]


def _last_len(state: SchedulerState, sequence: Sequence) -> int:
    """Returns the position of the sequence's last checkpoint."""
    begin_len = states_of(_allocation(sequence)).begin_len
    return max([begin_len, *_pending_lens(state, sequence)])


def _pending_lens(state: SchedulerState, sequence: Sequence) -> list[int]:
    """Returns the positions of its pending checkpoints. A row that is new to the device has none:
    if flights of it were dropped, theirs are forgotten when it begins."""
    if not sequence.written_pages:
        return []
    pending = states_of(_allocation(sequence)).pending
    return [each.num_pages * state.spec.page_size for each in pending]


def state_copies(
    state: SchedulerState, rows: Column, starts: Column | ArrayI32, query_lens: Column
) -> StateCopies | None:
    """Returns what a step reads and writes that computes so many tokens of each row from `starts`
    on, and takes the pages that it writes. It is not in flight yet."""
    cache, table = state.cache.states, state.table
    if cache is None:
        return None
    page_size, ends = state.spec.page_size, starts + query_lens
    reads, writes = list[tuple[int, int]](), list[tuple[int, int]]()
    for row in rows[table.written_pages[rows] == 0].tolist():
        allocation = _allocation(table.sequences[row])
        cache.forget_pending(allocation)
        if node := states_of(allocation).node:
            reads.append((row, cache.checkpoints.page_of(node)))
    is_at_end = (ends % page_size == 0) & (query_lens <= table.remaining[rows])
    for row, end in zip(rows[is_at_end].tolist(), ends[is_at_end].tolist(), strict=True):
        if _wants_checkpoint(state, sequence := table.sequences[row], end):
            is_passing, allocation = sequence.remaining == 1, _allocation(sequence)
            writes.append((row, cache.take(allocation, end // page_size, is_passing=is_passing)))
    if not reads and not writes:
        return None
    columns = ([pair[side] for pair in pairs] for pairs in (reads, writes) for side in (0, 1))
    return StateCopies(*map(pack_i32, columns))


def _wants_checkpoint(state: SchedulerState, sequence: Sequence, end: int) -> bool:
    """Returns whether the row takes a checkpoint at the end of its span, where a page ends."""
    cache, spec = state.cache.states, state.spec
    if cache is None or sequence.num_uncertain or not sequence.is_causal:
        return False
    if not cache.checkpoints.num_available:
        return False
    since, is_prefill = end - _last_len(state, sequence), sequence.remaining > 1
    if is_prefill and end in _targets(state, sequence):
        return True
    return since >= max(spec.checkpoint_interval, end // PARTS_OF_LEN * is_prefill)


def note_branch(state: SchedulerState, sequence: Sequence, keys: Keys[bytes], *, most: int) -> None:
    """Wants a checkpoint where the sequence, whose prefix was opened, parts with one that is
    cached, if its own prefix ends before."""
    cache = state.cache.states
    if cache is None:
        return
    allocation, num_alike = _allocation(sequence), cache.num_alike(keys, most=most)
    if num_alike > allocation.num_shared:
        states_of(allocation).branch_len = num_alike * state.spec.page_size


def ask_checkpoint(
    state: SchedulerState, leader: Sequence, *, num_cached: int, num_alike: int
) -> int:
    """Returns behind which of the first `num_alike` pages of a running row another sequence will
    find a checkpoint, of which it has `num_cached` pages now. That is one that the row takes
    anyway, or one that it is asked for here. 0: there will be none.
    """
    cache, page_size = state.cache.states, state.spec.page_size
    if cache is None or not cache.checkpoints.num_available:
        return 0
    states = states_of(_allocation(leader))
    start, first, last = leader.scheduled_len, num_cached * page_size, num_alike * page_size
    ends = _pending_lens(state, leader)
    ends += [target for target in _targets(state, leader) if target > start]
    found = [end for end in ends if first < end <= last]
    if not found and states.branch_len <= start < last:
        states.branch_len = last
        found = [target for target in _targets(state, leader) if target == last]
    return max(found, default=0) // page_size


def _allocation(sequence: Sequence) -> PageAllocation:
    assert sequence.allocation is not None
    return sequence.allocation
