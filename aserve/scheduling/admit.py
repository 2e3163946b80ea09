"""From a request to waiting sequences, and from waiting to a row. Knows nothing of steps in flight
but their pages.

Writes `Board.waiting` (in), `Board.running` (in), `Board.groups` (in) and `Board.arrivals`.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo, NeverFits, QueueFull
from aserve.messages import AdmitRequest, Refused
from aserve.scheduling.board import Board
from aserve.scheduling.budget import add_pages, fits_alone, has_room, most_pages, prefill_need
from aserve.scheduling.followers import follow, lead
from aserve.scheduling.held import ask_mask, has_slow_room
from aserve.scheduling.leave import leave
from aserve.scheduling.phases import Phase
from aserve.scheduling.request import Sequence
from aserve.scheduling.shares import place_refusal

MAX_LOOKS = 32  # waiting sequences that one launch looks at, about 50 us each with long prefixes


def receive(board: Board, request: AdmitRequest) -> None:
    """Queues every child of a request, or refuses the request with the numbers."""
    client = board.clients.find(request.client)
    children = [
        Sequence(request, child=child, arrival=board.arrivals + child, client=client)
        for child in range(request.sampling.n)
    ]
    refusal = _refusal(board, children)
    if refusal is not None:
        board.effects.append(Refused(request_id=request.request_id, error=refusal))
        return
    board.arrivals += len(children)
    board.clients.join(client, len(children))
    board.groups[request.request_id] = {sequence.child: sequence for sequence in children}
    for sequence in children:
        board.waiting.add(sequence)
    for sequence in children:
        _end_or_ask(board, sequence)


def admit(board: Board, prefills: list[Sequence], *, num_tokens: int) -> list[Sequence]:
    """Gives rows and cached prefixes to waiting sequences, in their order, while there is room and
    `num_tokens` of the step can feed them after the prefills of the same or better priority; who
    was let in.

    A sequence that runs alone always has room: that was tested when it came. The work of a call is
    bounded, because every sequence that is looked at is admitted or waits outside the queue
    afterwards, but for the one that has no room and those with slow masks.
    """
    admitted: list[Sequence] = []
    if not board.waiting or not board.rows.num_free:
        return admitted
    reserved = (0,) * len(board.spec.groups)
    for row in board.running.values():
        reserved = add_pages(reserved, prefill_need(board, row))
    passed_over: list[Sequence] = []
    num_looks = 0
    while board.rows.num_free and num_looks < MAX_LOOKS:
        sequence = board.waiting.pop()
        if sequence is None:
            break
        if not has_slow_room(board, sequence):
            passed_over.append(sequence)
            continue
        num_looks += 1
        if not _can_feed(sequence, [*prefills, *admitted], num_tokens=num_tokens):
            passed_over.append(sequence)
            break
        if not _open(board, sequence):
            continue
        total = add_pages(reserved, prefill_need(board, sequence))
        if board.running and not has_room(board, total):
            _undo_open(board, sequence)
            passed_over.append(sequence)
            break
        reserved = total
        _take_row(board, sequence)
        admitted.append(sequence)
    for waits in passed_over:
        board.waiting.add(waits)
    return admitted


def _can_feed(sequence: Sequence, prefills: list[Sequence], *, num_tokens: int) -> bool:
    """Whether prefills that go before this sequence leave tokens of the step to it."""
    before = [row.remaining for row in prefills if row.priority <= sequence.priority]
    return sum(before) < num_tokens


def _refusal(board: Board, children: list[Sequence]) -> ErrorInfo | None:
    first = children[0]
    if not fits_alone(board, first):
        needed = most_pages(board, first.max_kv_len)[0]
        usable = board.spec.groups[0].num_pages - 1
        return NeverFits(
            f"This request needs {needed} KV pages of {board.spec.page_size} tokens "
            f"(prompt {first.prompt_len} + max_tokens {first.max_tokens}), but the engine has "
            f"{usable}. Ask for fewer tokens, or start the server with more --num-pages."
        ).info()
    most = board.spec.max_waiting + board.spec.max_rows
    if len(children) > most:
        return NeverFits(
            f"This request asks for n = {len(children)} sequences, but the engine holds at most "
            f"{most}: {board.spec.max_rows} that run and {board.spec.max_waiting} that wait. Ask "
            f"for fewer, or start the server with a larger --max-queue."
        ).info()
    if board.num_waiting + len(children) > board.spec.max_waiting + board.rows.num_free:
        return QueueFull(
            f"The queue holds {board.num_waiting} of at most {board.spec.max_waiting} waiting "
            f"sequences, and this request adds {len(children)}. Try again later.",
            retry_after_s=1.0,
        ).info()
    return place_refusal(board, first.client, len(children))


def _end_or_ask(board: Board, sequence: Sequence) -> None:
    """What came with outputs that already reached an end ends here; else its first mask is due."""
    last = sequence.tokens.at(sequence.tokens.num - 1)
    ended_before = sequence.num_outputs > sequence.min_tokens and last in sequence.end_ids
    if ended_before:
        leave(board, sequence, "stop", stop_id=last)
    elif sequence.is_at_end:
        leave(board, sequence, "length")
    else:
        ask_mask(board, sequence)


def _open(board: Board, sequence: Sequence) -> bool:
    """Locks the cached prefix, unless a running row is about to commit the page behind it."""
    page_size = board.spec.page_size
    keys = sequence.page_keys(page_size) if board.spec.prefix_cache else sequence.keys
    most = min(sequence.max_cached_len // page_size, len(keys))
    prefix = board.cache.match(keys, most=most)
    if follow(board, sequence, num_cached=prefix.num_pages, most=most):
        return False
    sequence.holding = board.cache.open(prefix)
    sequence.committed_len = prefix.num_pages * page_size
    return True


def _undo_open(board: Board, sequence: Sequence) -> None:
    assert sequence.holding is not None
    board.cache.close(sequence.holding, sequence.keys, num_pages=0)
    sequence.holding = None
    sequence.committed_len = 0


def _take_row(board: Board, sequence: Sequence) -> None:
    """NOTE: the caller has taken the sequence out of the queue."""
    sequence.row = board.rows.take()
    sequence.move(Phase.RUNNING)
    if sequence.cached_len < 0:
        sequence.cached_len = min(sequence.committed_len, sequence.prompt_len)
        sequence.unpaid = sequence.tokens.num - sequence.committed_len
    sequence.client.take_row(sequence.unpaid)
    board.running[sequence.row] = sequence
    lead(board, sequence)
    if sequence.mask is not None:
        board.masked[sequence.row] = sequence
