"""Opens the cached prefix of a waiting sequence: the pages that the prefix cache has, and those
that the tiers below it have behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aserve.cache.page_keys import PageKeys
from aserve.scheduling.blocks import cached_prefix, whole_pages
from aserve.scheduling.budget import has_room
from aserve.scheduling.checkpoints import note_branch
from aserve.scheduling.followers import follow
from aserve.scheduling.ranks import rank_order
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


def open_with_room(
    state: SchedulerState,
    sequence: Sequence,
    ranks: Iterable[int],
    has_room: Callable[[Sequence], bool],
) -> bool | None:
    """Opens the prefix of the sequence on the first of the ranks, in the order in which it would
    have them, where it then has room. Returns None if it waits for a running row instead.
    """
    page_size = state.spec.page_size
    keys = sequence.page_keys(page_size) if state.spec.prefix_cache else sequence.keys
    for rank in rank_order(state, sequence, keys, ranks):
        if not _open_prefix(state, sequence, keys, rank=rank):
            return None
        if has_room(sequence):
            return True
        undo_open(state, sequence)
    return False


def undo_open(state: SchedulerState, sequence: Sequence) -> None:
    assert sequence.allocation is not None
    state.cache.of(sequence.allocation).close(sequence.allocation, sequence.keys, num_pages=0)
    sequence.allocation = None
    sequence.restart(0)


def has_pages(state: SchedulerState, sequence: Sequence, num_tokens: int) -> bool:
    """Returns whether all pages of its first tokens are there now."""
    assert sequence.allocation is not None
    allocation, num_pages = sequence.allocation, state.num_pages(num_tokens)
    missing = state.cache.of(allocation).missing(allocation, num_pages)
    return has_room(state, state.cache.in_pools(allocation.rank, missing))


def _open_prefix(state: SchedulerState, sequence: Sequence, keys: PageKeys, *, rank: int) -> bool:
    """Locks the cached prefix, unless a running row is about to commit the page behind it. KV is
    awaited only if a page of it or more is missing, and by a sequence that would run alone only if
    all its pages are there: nobody else would give it the others.
    """
    page_size, cache = state.spec.page_size, state.cache.ranks[rank]
    prefix, most = cached_prefix(state, sequence, keys, rank=rank)
    if follow(state, sequence, num_cached=prefix.num_pages, most=most):
        return False
    sequence.restart(prefix.num_pages * page_size)
    sequence.awaits_kv &= sequence.remaining > page_size
    sequence.num_stored = _num_stored(state, sequence, keys, start=prefix.num_pages, stop=most)
    skipped_len = sequence.num_stored * page_size
    if sequence.awaits_kv:
        # The transfer may leave the last token to be computed here.
        skipped_len = sequence.tokens.num - 1
    needed_len = sequence.tokens.num if sequence.awaits_kv else skipped_len
    is_alone = not (state.rows.num_taken_of(rank) or state.transfers)
    may_wait = sequence.awaits_kv and not is_alone
    sequence.allocation = cache.open(prefix, skipped_len=skipped_len)
    if skipped_len and not may_wait and not has_pages(state, sequence, needed_len):
        cache.close(sequence.allocation, keys, num_pages=0)
        sequence.num_stored, sequence.awaits_kv = 0, False
        sequence.allocation = cache.open(prefix)
    note_branch(state, sequence, keys, most=most)
    return True


def _num_stored(
    state: SchedulerState, sequence: Sequence, keys: PageKeys, *, start: int, stop: int
) -> int:
    """Returns the page index up to which the tiers have what the prefix cache lacks, 0 if they have
    nothing of it.
    """
    if sequence.awaits_kv or not sequence.may_load:
        return 0
    end = whole_pages(state.cache.stored.end_of(keys, start=start, stop=stop), state.spec)
    return end if end > start else 0
