"""From a request to waiting sequences, and from waiting to a row. Knows nothing of steps in flight
but their pages.

Writes `Board.waiting` (in), `Board.running` (in), `Board.groups` (in) and `Board.arrivals`.
"""

from __future__ import annotations

from aserve.errors import ErrorInfo, NeverFits, QueueFull
from aserve.messages import AdmitRequest, Refused
from aserve.scheduling.board import Board
from aserve.scheduling.budget import add_pages, fits_alone, has_room, most_pages, prefill_need
from aserve.scheduling.held import ask_mask, has_slow_room
from aserve.scheduling.leave import leave
from aserve.scheduling.phases import Phase
from aserve.scheduling.request import Sequence


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


def admit(board: Board) -> list[Sequence]:
    """Gives rows and cached prefixes to waiting sequences, in their order, while there is room; who
    was let in.

    A sequence that runs alone always has room: that was tested when it came.
    """
    admitted: list[Sequence] = []
    if not board.waiting or not board.rows.num_free:
        return admitted
    reserved = (0,) * len(board.spec.groups)
    passed_over: list[Sequence] = []
    coming: set[bytes] = set()  # keys of pages that running rows have not committed yet
    for row in board.running.values():
        reserved = add_pages(reserved, prefill_need(board, row))
        coming.update(_uncommitted_keys(board, row))
    while board.rows.num_free and (sequence := board.waiting.pop()) is not None:
        if not has_slow_room(board, sequence) or _shares_page(board, sequence, coming):
            passed_over.append(sequence)
            continue
        need = _open(board, sequence)
        total = add_pages(reserved, need)
        if board.running and not has_room(board, total):
            _undo_open(board, sequence)
            passed_over.append(sequence)
            break
        reserved = total
        _take_row(board, sequence)
        coming.update(_uncommitted_keys(board, sequence))
        admitted.append(sequence)
    for waits in passed_over:
        board.waiting.add(waits)
    return admitted


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
    if len(board.waiting) + len(children) > board.spec.max_waiting + board.rows.num_free:
        return QueueFull(
            f"The queue holds {len(board.waiting)} of at most {board.spec.max_waiting} waiting "
            f"sequences, and this request adds {len(children)}. Try again later.",
            retry_after_s=1.0,
        ).info()
    return None


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


def _shares_page(board: Board, sequence: Sequence, coming: set[bytes]) -> bool:
    """Whether its next page after the cached prefix is one that a running row is about to commit.

    Such a sequence is passed over, so that siblings and equal prompts compute a shared page once.
    """
    if not coming:
        return False
    usable = _usable_keys(board, sequence)
    index = board.cache.match(usable).num_pages
    return index < len(usable) and usable[index] in coming


def _uncommitted_keys(board: Board, sequence: Sequence) -> list[bytes]:
    """A key stands for its page's whole prefix: equal keys are equal pages."""
    if not board.spec.prefix_cache:
        return []
    return sequence.keys[sequence.committed_len // board.spec.page_size :]


def _usable_keys(board: Board, sequence: Sequence) -> list[bytes]:
    page_size = board.spec.page_size
    return sequence.page_keys(page_size)[: sequence.max_cached_len // page_size]


def _open(board: Board, sequence: Sequence) -> tuple[int, ...]:
    """Locks the cached prefix and says what its whole prefill and one more token still take."""
    prefix = board.cache.match(_usable_keys(board, sequence))
    sequence.holding = board.cache.open(prefix)
    sequence.committed_len = prefix.num_pages * board.spec.page_size
    return prefill_need(board, sequence)


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
    if sequence.mask is not None:
        board.masked[sequence.row] = sequence
