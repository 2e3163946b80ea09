"""What came back becomes fact: tokens, committed length, pages into the tree, ends. The only
writer of `committed_len` (upwards) and of `tokens`. Results find their sequence by (iteration,
row) as it was launched; what belongs to a sequence that has left falls away.
"""

from __future__ import annotations

import numpy as np

from aserve.messages import (
    ArrayI32,
    RowLogprobs,
    SampleResult,
    SequenceOutput,
    StepOutput,
    StepResult,
    array_i32,
)
from aserve.scheduling.board import Board
from aserve.scheduling.held import ask_mask
from aserve.scheduling.leave import leave, settle
from aserve.scheduling.phases import Phase
from aserve.scheduling.request import Flight, Sequence

Rider = tuple[Sequence, Flight]


def commit_step(board: Board, result: StepResult) -> None:
    step = board.steps.pop(result.iteration, None)
    if step is None:
        return  # dropped by a failure before it
    for sequence, flight in step.riders.values():
        if not flight.samples:
            _commit_chunk(board, sequence, flight)
    _commit_tokens(board, result, step.riders)


def commit_samples(board: Board, result: SampleResult) -> None:
    riders: dict[int, Rider] = {}
    for row in array_i32(result.rows).tolist():
        rider = board.samples.pop((result.iteration, row), None)
        if rider is not None:
            riders[row] = rider
    _commit_tokens(board, result, riders)


def _commit_chunk(board: Board, sequence: Sequence, flight: Flight) -> None:
    """A middle chunk: its KV is there, and nothing was sampled."""
    if flight not in sequence.flights:
        return
    _land(board, sequence, flight, advance=flight.span)
    settle(board, sequence)


def _commit_tokens(
    board: Board, result: StepResult | SampleResult, riders: dict[int, Rider]
) -> None:
    counts = array_i32(result.counts)
    tokens = np.split(array_i32(result.tokens), np.cumsum(counts)[:-1])
    logprobs = {record.row: record for record in result.logprobs}
    outputs: list[SequenceOutput] = []
    ended: list[tuple[Sequence, int | None]] = []
    # NOTE: not strict, because split makes one empty part of nothing.
    for row, token_ids in zip(array_i32(result.rows).tolist(), tokens, strict=False):
        sequence, flight = riders.get(row, (None, None))
        if sequence is None or flight is None or flight not in sequence.flights:
            continue
        output, stop_id, is_end = _append(board, sequence, flight, token_ids, logprobs.get(row))
        outputs.append(output)
        if is_end:
            ended.append((sequence, stop_id))
    if outputs:
        board.effects.append(StepOutput(iteration=result.iteration, sequences=tuple(outputs)))
    for sequence, stop_id in ended:
        leave(board, sequence, "length" if stop_id is None else "stop", stop_id=stop_id)


def _append(
    board: Board,
    sequence: Sequence,
    flight: Flight,
    token_ids: ArrayI32,
    logprobs: RowLogprobs | None,
) -> tuple[SequenceOutput, int | None, bool]:
    """Appends the tokens up to an end. Of a verify window, the root and the accepted drafts have
    valid KV.
    """
    position = sequence.num_outputs
    advance = flight.span - flight.num_drafts + len(token_ids) - 1
    stop_id: int | None = None
    num_kept = 0
    for token_id in token_ids.tolist():
        sequence.tokens.append(token_id)
        num_kept += 1
        if token_id in sequence.end_ids and sequence.num_outputs > sequence.sampling.min_tokens:
            stop_id = token_id
        if stop_id is not None or sequence.num_outputs >= sequence.max_tokens:
            break
    _land(board, sequence, flight, advance=advance)
    output = SequenceOutput(
        request_id=sequence.request_id,
        child=sequence.child,
        position=position,
        token_ids=token_ids[:num_kept].tobytes(),
        cached_len=sequence.cached_len,
        logprobs=() if logprobs is None else (_cut(logprobs, num_kept, of=len(token_ids)),),
    )
    is_end = stop_id is not None or sequence.num_outputs >= sequence.max_tokens
    if not is_end:
        ask_mask(board, sequence)
        settle(board, sequence)
    return output, stop_id, is_end


def _cut(logprobs: RowLogprobs, num_kept: int, *, of: int) -> RowLogprobs:
    """Tokens and logprobs end at the same place, also inside an accepted run."""
    if num_kept == of:
        return logprobs
    chosen_bytes = len(logprobs.chosen) // of * num_kept
    top_bytes = len(logprobs.top_ids) // of * num_kept
    return RowLogprobs(
        row=logprobs.row,
        chosen=logprobs.chosen[:chosen_bytes],
        top_ids=logprobs.top_ids[:top_bytes],
        top_logprobs=logprobs.top_logprobs[:top_bytes],
    )


def _land(board: Board, sequence: Sequence, flight: Flight, *, advance: int) -> None:
    """One flight is back: the committed clock advances and whole committed pages enter the tree."""
    assert sequence.flights[0] is flight
    sequence.flights.pop(0)
    sequence.failures = 0
    if sequence.phase is not Phase.RUNNING:
        return  # retracted: its tokens count, its pages are gone
    assert sequence.holding is not None
    sequence.committed_len += advance
    committed = min(sequence.committed_len, len(sequence.tokens))
    num_pages = committed // board.spec.page_size
    board.cache.commit(
        sequence.holding, sequence.page_keys(board.spec.page_size), num_pages=num_pages
    )
    board.cache.release_behind(sequence.holding, sequence.committed_len)
