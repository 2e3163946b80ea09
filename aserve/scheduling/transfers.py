"""Sequences whose KV is computed elsewhere, as in prefill/decode disaggregation.

Such a sequence is admitted like any other, with its prefix hit, all its pages and a row, and then
awaits its KV (`Phase.AWAITING_KV`). The transfer is a flight of the sequence: it brings the KV of
the tokens behind the prefix hit, but for the last one, and no output. When it is back, the sequence
goes on as if they had been computed here, with a step of its last token. If the transfer fails, or
the sequence is retracted later, they are.

A transfer is not ordered with the device's steps. So it begins when the steps that were launched
before the pages were taken are back, and the samples of their held rows, since a former owner of a
page may have been in them. And the pages are held until the transfer ends: a sequence that ends
first leaves them to it. The sequence cannot be retracted meanwhile.

The engine that computes a prompt for another one says so after each step, as long as the pages are
the sequence's (SendKv, in advance.py). The executor reads them before any step that is launched
later, and such a step alone can write them.

WHY a row: everything that counts pages (reserve, forecast, retraction, shares of clients) counts
rows. The price is that a row is idle during the transfer.

Writes `SchedulerState.transfers` and `SchedulerState.unsent`.
"""

from __future__ import annotations

import numpy as np

from aserve.messages.base import pack_i32
from aserve.messages.results import SampleResult
from aserve.messages.transfers import KvFailed, KvReady, ReceiveKv
from aserve.scheduling.commit import commit_tokens
from aserve.scheduling.finish import step_back
from aserve.scheduling.flights import drop_flights, new_step, send
from aserve.scheduling.loads import load_effect
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState, Transfer


def await_kv(state: SchedulerState, sequence: Sequence) -> None:
    """Takes all pages for a sequence that was admitted and has room for them."""
    assert sequence.allocation is not None
    cache = state.cache.of(sequence.allocation)
    cache.grow([sequence.allocation], [state.num_pages(sequence.tokens.num)])
    table, caps = state.table, state.spec.decode
    table.num_pages[sequence.row] = sequence.allocation.num_pages
    rows = np.array([sequence.row])
    step = new_step(table, rows, table.remaining[rows], iteration=state.next_iteration, caps=caps)
    send(table, step, stamp=0)
    sequence.written_pages = 0  # the device knows nothing of it
    sequence.is_blocked = True
    transfer = Transfer(sequence, step, sequence.allocation, after=state.next_iteration - 1)
    state.unsent.append(transfer)


def begin_transfers(state: SchedulerState) -> None:
    """Asks for the KV of every sequence whose pages no step in flight can write any more."""
    while state.unsent and _have_landed(state, last=state.unsent[0].after):
        transfer = state.unsent.pop(0)
        sequence = transfer.sequence
        if sequence.phase is not Phase.AWAITING_KV:
            continue
        state.cache.of(transfer.allocation).hold(transfer.allocation)
        state.transfers[sequence.request_id, sequence.child] = transfer
        state.effects.append(
            load_effect(state, transfer) if transfer.step is None else _receive_effect(transfer)
        )


def _have_landed(state: SchedulerState, *, last: int) -> bool:
    """Returns whether the steps up to `last` are back, and what samples their held rows. With
    drafts, that writes to the pages of a window, even if these have a new owner."""
    return last <= state.landed and all(iteration > last for iteration, _ in state.samples)


def _receive_effect(transfer: Transfer) -> ReceiveKv:
    sequence = transfer.sequence
    return ReceiveKv(
        request_id=sequence.request_id,
        child=sequence.child,
        first=sequence.committed_len,
        num_tokens=sequence.tokens.num,
        token_ids=sequence.tokens.packed(0, sequence.tokens.num),
        namespace=sequence.keys.namespace,
        pages=transfer.allocation.packed(),
    )


def end_transfer(state: SchedulerState, event: KvReady | KvFailed) -> None:
    transfer = state.transfers.pop((event.request_id, event.child), None)
    if transfer is None or transfer.step is None:
        return
    state.cache.of(transfer.allocation).release(transfer.allocation)
    sequence = transfer.sequence
    if sequence.phase is not Phase.AWAITING_KV:
        return
    sequence.move(Phase.RUNNING)
    sequence.awaits_kv = sequence.is_blocked = False
    if isinstance(event, KvFailed):
        drop_flights(sequence)
        step_back(state, sequence)
        return
    row = sequence.row
    brought = SampleResult(iteration=0, rows=pack_i32([row]), counts=pack_i32([0]), tokens=b"")
    state.draft_choice.note_decode(state.table, row)
    commit_tokens(state, brought, transfer.step)
