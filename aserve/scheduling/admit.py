"""From a request to waiting sequences, and from waiting to a row. Knows nothing of steps in flight
but their pages.

Writes `SchedulerState.waiting` (in), `SchedulerState.running` (in), `SchedulerState.groups` (in)
and `SchedulerState.arrivals`.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo, NeverFits, QueueFull
from aserve.messages.output import Refused
from aserve.messages.requests import AdmitRequest
from aserve.scheduling.budget import add_pages, fits_alone, has_room, most_pages, prefill_need
from aserve.scheduling.finish import finish
from aserve.scheduling.followers import follow, lead
from aserve.scheduling.grammar_rows import ask_mask, has_slow_room
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.shares import place_refusal
from aserve.scheduling.state import SchedulerState

MAX_LOOKS = 32  # waiting sequences that one launch looks at, about 50 us each with long prefixes


def receive(state: SchedulerState, request: AdmitRequest) -> None:
    """Queues every child of a request, or refuses the request with the numbers."""
    client = state.clients.find(request.client)
    children = [
        Sequence(request, child=child, arrival=state.arrivals + child, client=client)
        for child in range(request.sampling.n)
    ]
    refusal = _refusal(state, children)
    if refusal is not None:
        state.effects.append(Refused(request_id=request.request_id, error=refusal))
        return
    state.arrivals += len(children)
    state.clients.join(client, len(children))
    state.groups[request.request_id] = {sequence.child: sequence for sequence in children}
    for sequence in children:
        state.waiting.add(sequence)
    for sequence in children:
        _end_or_ask(state, sequence)


def admit(state: SchedulerState, prefills: list[Sequence], *, num_tokens: int) -> list[Sequence]:
    """Gives rows and cached prefixes to waiting sequences, in their order, while there is room and
    `num_tokens` of the step can feed them after the prefills of the same or better priority; who
    was let in.

    A sequence that runs alone always has room: that was tested when it came. The work of a call is
    bounded, because every sequence that is looked at is admitted or waits outside the queue
    afterwards, but for the one that has no room and those with slow masks.
    """
    admitted: list[Sequence] = []
    if not state.waiting or not state.rows.num_free:
        return admitted
    reserved = (0,) * len(state.spec.groups)
    for row in state.running.values():
        reserved = add_pages(reserved, prefill_need(state, row))
    passed_over: list[Sequence] = []
    num_looks = 0
    while state.rows.num_free and num_looks < MAX_LOOKS:
        sequence = state.waiting.pop()
        if sequence is None:
            break
        if not has_slow_room(state, sequence):
            passed_over.append(sequence)
            continue
        num_looks += 1
        if not _can_feed(sequence, [*prefills, *admitted], num_tokens=num_tokens):
            passed_over.append(sequence)
            break
        if not _open(state, sequence):
            continue
        total = add_pages(reserved, prefill_need(state, sequence))
        if state.running and not has_room(state, total):
            _undo_open(state, sequence)
            passed_over.append(sequence)
            break
        reserved = total
        _take_row(state, sequence)
        admitted.append(sequence)
    for waits in passed_over:
        state.waiting.add(waits)
    return admitted


def _can_feed(sequence: Sequence, prefills: list[Sequence], *, num_tokens: int) -> bool:
    """Whether prefills that go before this sequence leave tokens of the step to it."""
    before = [row.remaining for row in prefills if row.priority <= sequence.priority]
    return sum(before) < num_tokens


def _refusal(state: SchedulerState, children: list[Sequence]) -> ErrorInfo | None:
    first = children[0]
    if not fits_alone(state, first):
        needed = most_pages(state, first.max_kv_len)[0]
        usable = state.spec.groups[0].num_pages - 1
        return NeverFits(
            f"This request needs {needed} KV pages of {state.spec.page_size} tokens "
            f"(prompt {first.prompt_len} + max_tokens {first.max_tokens}), but the engine has "
            f"{usable}. Ask for fewer tokens, or start the server with more --num-pages."
        ).info()
    most = state.spec.max_waiting + state.spec.max_rows
    if len(children) > most:
        return NeverFits(
            f"This request asks for n = {len(children)} sequences, but the engine holds at most "
            f"{most}: {state.spec.max_rows} that run and {state.spec.max_waiting} that wait. Ask "
            f"for fewer, or start the server with a larger --max-queue."
        ).info()
    if state.num_waiting + len(children) > state.spec.max_waiting + state.rows.num_free:
        return QueueFull(
            f"The queue holds {state.num_waiting} of at most {state.spec.max_waiting} waiting "
            f"sequences, and this request adds {len(children)}. Try again later.",
            retry_after_s=1.0,
        ).info()
    return place_refusal(state, first.client, len(children))


def _end_or_ask(state: SchedulerState, sequence: Sequence) -> None:
    """What came with outputs that already reached an end ends here; else its first mask is due."""
    last = sequence.tokens.at(sequence.tokens.num - 1)
    ended_before = sequence.num_outputs > sequence.min_tokens and last in sequence.end_ids
    if ended_before:
        finish(state, sequence, "stop", stop_id=last)
    elif sequence.is_at_end:
        finish(state, sequence, "length")
    else:
        ask_mask(state, sequence)


def _open(state: SchedulerState, sequence: Sequence) -> bool:
    """Locks the cached prefix, unless a running row is about to commit the page behind it."""
    page_size = state.spec.page_size
    keys = sequence.page_keys(page_size) if state.spec.prefix_cache else sequence.keys
    most = min(sequence.max_cached_len // page_size, len(keys))
    prefix = state.cache.match(keys, most=most)
    if follow(state, sequence, num_cached=prefix.num_pages, most=most):
        return False
    sequence.allocation = state.cache.open(prefix)
    sequence.committed_len = prefix.num_pages * page_size
    return True


def _undo_open(state: SchedulerState, sequence: Sequence) -> None:
    assert sequence.allocation is not None
    state.cache.close(sequence.allocation, sequence.keys, num_pages=0)
    sequence.allocation = None
    sequence.committed_len = 0


def _take_row(state: SchedulerState, sequence: Sequence) -> None:
    """NOTE: the caller has taken the sequence out of the queue."""
    sequence.row = state.rows.take()
    sequence.move(Phase.RUNNING)
    if sequence.cached_len < 0:
        sequence.cached_len = min(sequence.committed_len, sequence.prompt_len)
        sequence.unpaid = sequence.tokens.num - sequence.committed_len
    sequence.client.take_row(sequence.unpaid)
    state.running[sequence.row] = sequence
    lead(state, sequence)
    if sequence.mask is not None:
        state.masked[sequence.row] = sequence
