"""Turns requests into waiting sequences, and gives waiting sequences rows and cached prefixes.

Writes `SchedulerState.waiting` (in), `SchedulerState.running` (in), `SchedulerState.groups` (in)
and `SchedulerState.arrivals`.
"""

from __future__ import annotations

from collections.abc import Collection

from aserve.messages.output import Refused
from aserve.messages.requests import AdmitRequest
from aserve.scheduling.finish import finish_at_end
from aserve.scheduling.followers import lead
from aserve.scheduling.forced import end_reasoning
from aserve.scheduling.forecast import fits_ahead
from aserve.scheduling.grammar_rows import ask_mask, has_slow_room, return_slow
from aserve.scheduling.loads import await_load
from aserve.scheduling.prefill_line import PrefillLine
from aserve.scheduling.prefixes import has_pages, open_with_room
from aserve.scheduling.ranks import sequences_by_rank
from aserve.scheduling.refusals import refusal_of
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.reserve import Reserve
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.tick import PAGES_PER_LOOK
from aserve.scheduling.transfers import await_kv


def consider(state: SchedulerState, request: AdmitRequest) -> list[Sequence] | Refused:
    """Returns the sequences of a request, or its refusal with the numbers. It changes nothing."""
    client, caps = state.clients.find(request.client), state.spec.decode
    children = [
        Sequence(request, child=child, arrival=state.arrivals + child, client=client, caps=caps)
        for child in range(request.sampling.n)
    ]
    refusal = refusal_of(state, children, is_resumed=request.is_resumed)
    return children if refusal is None else Refused(request.request_id, refusal)


def receive(state: SchedulerState, arrival: list[Sequence] | Refused) -> None:
    """Queues what `consider` returned, before any other event is handled."""
    if isinstance(arrival, Refused):
        state.effects.append(arrival)
        return
    first = arrival[0]
    state.arrivals += len(arrival)
    state.has_senders |= first.sends_kv
    state.has_uncut |= any(picture.sees_itself for picture in first.pictures)
    state.clients.join(first.client, len(arrival))
    state.groups[first.request_id] = {sequence.child: sequence for sequence in arrival}
    for sequence in arrival:
        state.waiting.add(sequence)
    for sequence in arrival:
        _end_or_ask(state, sequence)


def admit(
    state: SchedulerState,
    prefills: list[Sequence],
    *,
    num_tokens: list[int],
    owed: Collection[Sequence] = (),
) -> list[Sequence]:
    """Gives rows and cached prefixes to waiting sequences, in their order, while there is room and
    `num_tokens` of some rank's step suffice for them after the prefills that go before them.
    Returns the new prefills. Those that are `owed` a place need not fit the forecast of pages.

    A sequence that runs alone always has room: that was tested when it came. The work of a tick is
    bounded by `looks_left`, and every sequence that is looked at is admitted or waits outside the
    queue afterwards, but for the one that has no room.
    """
    return_slow(state)
    admitted: list[Sequence] = []
    if not state.waiting or not state.rows.num_free:
        return admitted
    reserve = Reserve(state)
    by_rank = sequences_by_rank(state, prefills)
    lines = [PrefillLine(*each) for each in zip(by_rank, num_tokens, strict=True)]
    while state.rows.num_free and state.looks_left > 0:
        sequence = state.waiting.pop()
        if sequence is None:
            break
        state.looks_left -= 1
        if not has_slow_room(state, sequence):
            state.slow_waiting.add(sequence)
            continue
        ranks = [
            rank
            for rank, line in enumerate(lines)
            if state.rows.num_free_of(rank) and line.has_tokens_for(sequence)
        ]
        has_room = open_with_room(
            state, sequence, ranks, lambda each: _has_room(state, each, reserve, owed)
        )
        if has_room is None:
            continue
        if not has_room:
            state.waiting.add(sequence)
            break
        _take_row(state, sequence)
        reserve.add(sequence)
        if sequence.phase is Phase.RUNNING:
            lines[sequence.rank].add(sequence)
            admitted.append(sequence)
        assert sequence.allocation is not None
        state.looks_left -= sequence.allocation.num_pages // PAGES_PER_LOOK
    return admitted


def _end_or_ask(state: SchedulerState, sequence: Sequence) -> None:
    """Finishes a sequence whose earlier outputs reached an end already, and asks for the first mask
    of any other.
    """
    if not sequence.is_at_end:
        end_reasoning(state, sequence)
    if sequence.is_at_end:
        finish_at_end(state, sequence)
    else:
        ask_mask(state, sequence)


def _has_room(
    state: SchedulerState, sequence: Sequence, reserve: Reserve, owed: Collection[Sequence]
) -> bool:
    if sequence.awaits_kv and not has_pages(state, sequence, sequence.tokens.num):
        return False
    return not state.rows.num_taken_of(sequence.rank) or (
        reserve.has_room_beside(sequence) and (sequence in owed or fits_ahead(state, sequence))
    )


def _take_row(state: SchedulerState, sequence: Sequence) -> None:
    """NOTE: the caller has taken the sequence out of the queue."""
    is_awaiting = sequence.awaits_kv or sequence.num_stored > 0
    sequence.move(Phase.AWAITING_KV if is_awaiting else Phase.RUNNING)
    if sequence.cached_len < 0:
        sequence.cached_len = min(sequence.committed_len, sequence.prompt_len)
        sequence.unpaid = sequence.tokens.num - sequence.committed_len
    sequence.client.take_row(sequence.unpaid)
    sequence.first_iteration = state.next_iteration
    row = state.rows.take(sequence.rank)
    sequence.take_row(state.table, row)
    state.seat(sequence)
    for token_id in sequence.end_ids:
        if 0 <= token_id < state.spec.vocab_size:  # the others are never sampled
            state.end_ids[token_id] = True
    lead(state, sequence, num_committed=sequence.cacheable_len // state.spec.page_size)
    if sequence.mask is not None:
        state.masked[sequence.row] = sequence
    if is_awaiting:
        (await_kv if sequence.awaits_kv else await_load)(state, sequence)
    elif sequence.remaining <= state.spec.decode.root_len:
        state.draft_choice.note_decode(state.table, row)
