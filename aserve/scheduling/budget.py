"""Counts the pages that rows need. Nothing here changes the state."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add

from aserve.messages.executor import EngineSpec
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState

Pages = tuple[int, ...]  # one number per layer group


def most_pages(state: SchedulerState, num_positions: int) -> Pages:
    """Pages per group that a sequence alone holds at most when it covers `num_positions`.

    A windowed group holds the window, the page that it enters and the page that it leaves.
    """
    whole = state.num_pages(num_positions)
    return tuple(
        whole if group.window is None else min(whole, state.num_pages(group.window) + 2)
        for group in state.spec.groups
    )


def fits_alone(state: SchedulerState, sequence: Sequence) -> bool:
    """The test at admission to the queue: what fails it could never finish."""
    needed = most_pages(state, sequence.max_kv_len)
    if min_query_len(sequence) > 1:
        whole = state.num_pages(sequence.prompt_len)
        needed = tuple(max(whole, pages) for pages in needed)
    return all(
        need < group.num_pages for need, group in zip(needed, state.spec.groups, strict=True)
    )


def next_query_len(spec: EngineSpec, sequence: Sequence) -> int:
    """Tokens that the row would like to have in its next step: the rest of a prefill, or a decode
    with its drafts.

    0 where a verify window or a block has no room left within `max_kv_len` positions: results must
    come first.
    """
    wanted = sequence.remaining
    room = sequence.max_kv_len - sequence.scheduled_len
    root_len = spec.decode.root_len
    if wanted == root_len and (sequence.relay_stamp or not root_len) and sequence.mask is None:
        wanted = spec.decode.max_tokens_per_step
    return wanted if wanted < room else room


def min_query_len(sequence: Sequence) -> int:
    """Tokens that the row must compute in its next step at least: a prompt that is not causal is
    not cut into chunks.
    """
    return 1 if sequence.is_causal else max(1, sequence.prompt_len - sequence.scheduled_len)


def step_need(state: SchedulerState, sequences: Iterable[Sequence]) -> Pages:
    """Pages that one more step of these rows takes from the pools, prefills sharing the step's
    token budget. In a windowed group a prefill gets by with one page, since its chunks shrink to
    that, and a row with something in flight can wait: what comes back frees pages.
    """
    tokens_left = state.spec.max_batched_tokens
    total: Pages = (0,) * len(state.spec.groups)
    for sequence in sequences:
        query_len = max(1, next_query_len(state.spec, sequence))
        most: int | None = 0 if sequence.flights else None
        if sequence.remaining > state.spec.decode.root_len:
            query_len = min(query_len, max(1, tokens_left))
            tokens_left -= query_len
            most = 0 if sequence.flights else max(1, state.num_pages(min_query_len(sequence)))
        covered = min(sequence.scheduled_len + query_len, sequence.max_kv_len)
        count = _num_missing(state, sequence, covered)
        if count:
            total = add_pages(total, _by_group(state, count, most=most))
    return total


def prefill_need(state: SchedulerState, sequence: Sequence) -> Pages:
    """Pages that a running row still takes for its whole prefill and one more step.

    NOTE: never less than step_need says, else a row could be admitted that the next step retracts.
    """
    ahead = sequence.scheduled_len + sequence.remaining + state.spec.decode.max_tokens_per_step
    covered = min(ahead, sequence.max_kv_len)
    count = _num_missing(state, sequence, covered)
    if not count:
        return (0,) * len(state.spec.groups)
    least = state.num_pages(min_query_len(sequence))
    return tuple(min(count, max(least, pages)) for pages in most_pages(state, covered))


def _num_missing(state: SchedulerState, sequence: Sequence, num_positions: int) -> int:
    """Page indices that the row lacks to cover so many positions."""
    assert sequence.allocation is not None
    return max(0, state.num_pages(num_positions) - sequence.allocation.num_pages)


def _by_group(state: SchedulerState, count: int, *, most: int | None) -> Pages:
    """So many pages in every group; `most` bounds the windowed ones."""
    return tuple(
        count if most is None or group.window is None else min(count, most)
        for group in state.spec.groups
    )


def spare_pages(state: SchedulerState, sequence: Sequence, *, step_total: Pages | None) -> int:
    """Pages that a prefill may take in every group, so that all other rows can still take one more
    step; `step_total` is what one more step of all running rows needs, None with ample room.
    """
    if step_total is None:
        return state.num_pages(state.spec.max_batched_tokens) + 1
    own = step_need(state, [sequence])
    return min(
        state.cache.available(group) - max(0, total - mine)
        for group, (total, mine) in enumerate(zip(step_total, own, strict=True))
    )


def has_room(state: SchedulerState, need: Pages) -> bool:
    return all(state.cache.available(group) >= pages for group, pages in enumerate(need))


def has_ample_room(state: SchedulerState) -> bool:
    """Whether there are more pages than a step of any rows could take, beside those of one more
    decode of every row. Mostly there are, and then nobody has to count.
    """
    per_row = 1 + state.num_pages(state.spec.decode.max_tokens_per_step)
    most = len(state.running) * per_row + state.num_pages(state.spec.max_batched_tokens)
    groups = range(len(state.spec.groups))
    return all(state.cache.available(group) >= most for group in groups)


def add_pages(left: Pages, right: Pages) -> Pages:
    return tuple(map(add, left, right))
