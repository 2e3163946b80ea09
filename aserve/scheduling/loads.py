"""KV that goes down to the tiers below the prefix cache, host memory and files, and comes up again.

Pages go down when they enter the prefix cache or leave it (cache/stored_pages.py). SaveKv comes
before the launch of any step that could write them, and the executor reads them in that order.

A sequence whose prefix hit goes on in the tiers takes the pages for it at its admission, and awaits
their KV with its row, as one whose KV comes from another engine does (transfers.py). But this
transfer is no flight, since only its end says how many pages came: the rest of the prompt is a
prefill, which begins when the KV is there. If less came than the tiers were said to have, the
sequence computes the rest, and does not ask them again.

A page that is missing in a windowed group, because the sequence was to begin behind it, cannot be
made up for: such a sequence is admitted anew.

Writes `SchedulerState.transfers` and `SchedulerState.unsent`.
"""

from __future__ import annotations

from aserve.messages.transfers import KvLoaded, LoadKv, TiersChanged
from aserve.scheduling.advance import commit_pages
from aserve.scheduling.blocks import whole_pages
from aserve.scheduling.finish import step_back
from aserve.scheduling.flights import rows_of
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState, Transfer


def save_pages(state: SchedulerState) -> None:
    """Hands down the pages that have been noted since the last call."""
    effect = state.cache.stored.take()
    if effect is not None:
        state.effects.append(effect)


def change_tiers(state: SchedulerState, event: TiersChanged) -> None:
    state.cache.stored.change(added=event.added, removed=event.removed)


def await_load(state: SchedulerState, sequence: Sequence) -> None:
    """Takes the pages that the tiers fill, for a sequence that was admitted and has room for
    them.
    """
    assert sequence.allocation is not None
    state.cache.of(sequence.allocation).grow([sequence.allocation], [sequence.num_stored])
    state.table.num_pages[sequence.row] = sequence.allocation.num_pages
    sequence.is_blocked = True
    after = state.next_iteration - 1
    state.unsent.append(Transfer(sequence, None, sequence.allocation, after=after))


def load_effect(state: SchedulerState, transfer: Transfer) -> LoadKv:
    sequence, page_size = transfer.sequence, state.spec.page_size
    first, stop = sequence.committed_len // page_size, sequence.num_stored
    return LoadKv(
        request_id=sequence.request_id,
        child=sequence.child,
        first=first,
        keys=b"".join(sequence.keys[first:stop]),
        token_ids=sequence.tokens.packed(first * page_size, stop * page_size),
        pages=tuple(pages[first:stop].tobytes() for pages in transfer.allocation.pages),
    )


def end_load(state: SchedulerState, event: KvLoaded) -> None:
    transfer = state.transfers.pop((event.request_id, event.child), None)
    if transfer is None:
        return
    cache = state.cache.of(transfer.allocation)
    cache.release(transfer.allocation)
    sequence = transfer.sequence
    if sequence.phase is not Phase.AWAITING_KV:
        return
    sequence.move(Phase.RUNNING)
    sequence.is_blocked = False
    sequence.may_load = event.num_pages >= sequence.num_stored
    if state.cache.has_windows and not sequence.may_load:
        step_back(state, sequence)
        return
    num_loaded = whole_pages(event.num_pages, state.spec) * state.spec.page_size
    sequence.restart(max(sequence.committed_len, num_loaded))
    # Steps in flight may still name the row for a former owner, and their results are not for it.
    sequence.first_iteration = state.next_iteration
    _note_hit(state, sequence)
    commit_pages(state, rows_of([sequence]))
    if state.cache.has_windows:
        cache.release_behind(transfer.allocation, sequence.committed_len)
    if sequence.remaining <= state.spec.decode.root_len:
        state.draft_choice.note_decode(state.table, sequence.row)


def _note_hit(state: SchedulerState, sequence: Sequence) -> None:
    """Counts what came like what the prefix cache has: the client does not pay for it."""
    if not sequence.last_iteration:
        sequence.cached_len = min(sequence.committed_len, sequence.prompt_len)
    num_excused = max(0, sequence.unpaid - sequence.remaining)
    sequence.unpaid -= num_excused
    sequence.client.excuse_prompt(num_excused)
    state.waiting.reorder(sequence.client)
    state.slow_waiting.reorder(sequence.client)
