"""What came back becomes fact: tokens, committed length, pages into the tree, ends. The only
writer of `committed_len` (upwards) and of `tokens`. Results find their sequence by (iteration,
row) as it was launched; what belongs to a sequence that has left falls away.
"""

from __future__ import annotations

from aserve.messages.base import array_i32
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.messages.results import RowLogprobs, SampleResult, StepResult
from aserve.scheduling.finish import finish, settle
from aserve.scheduling.flights import Flight
from aserve.scheduling.followers import lead, wake
from aserve.scheduling.grammar_rows import ask_mask
from aserve.scheduling.prompts import hand_out_prompts
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.shares import charge_prompt
from aserve.scheduling.state import SchedulerState

Rider = tuple[Sequence, Flight]


def commit_step(state: SchedulerState, result: StepResult) -> None:
    step = state.steps.pop(result.iteration, None)
    if step is None:
        return  # dropped by a failure before it
    if result.prompt_logprobs or result.embeddings:
        hand_out_prompts(state, result, step.rows)
    for sequence, flight in step.rows.values():
        if not flight.samples:
            _commit_chunk(state, sequence, flight)
    _commit_tokens(state, result, step.rows)


def commit_samples(state: SchedulerState, result: SampleResult) -> None:
    rows: dict[int, Rider] = {}
    for row in array_i32(result.rows).tolist():
        rider = state.samples.pop((result.iteration, row), None)
        if rider is not None:
            rows[row] = rider
    _commit_tokens(state, result, rows)


def _commit_chunk(state: SchedulerState, sequence: Sequence, flight: Flight) -> None:
    """A chunk whose KV is there, and of which nothing was sampled."""
    if flight not in sequence.flights:
        return
    _land(state, sequence, flight, advance=flight.query_len)
    if flight.ends:
        finish(state, sequence, "length")
    else:
        settle(state, sequence)


def _commit_tokens(
    state: SchedulerState, result: StepResult | SampleResult, rows: dict[int, Rider]
) -> None:
    logprobs = {record.row: record for record in result.logprobs}
    tokens = array_i32(result.tokens).tolist()
    outputs: list[SequenceOutput] = []
    ended: list[tuple[Sequence, int | None]] = []
    stop = 0
    for row, count in zip(
        array_i32(result.rows).tolist(), array_i32(result.counts).tolist(), strict=True
    ):
        start, stop = stop, stop + count
        sequence, flight = rows.get(row, (None, None))
        if sequence is None or flight is None or flight not in sequence.flights:
            continue
        position = sequence.num_outputs
        num_kept, stop_id, is_end = _append(sequence, tokens[start:stop])
        sequence.client.serve_outputs(num_kept)
        # Of a verify window, the root and the accepted drafts have valid KV.
        _land(state, sequence, flight, advance=flight.query_len - flight.num_drafts + count - 1)
        outputs.append(
            SequenceOutput(
                request_id=sequence.request_id,
                child=sequence.child,
                position=position,
                token_ids=result.tokens[start * 4 : (start + num_kept) * 4],
                cached_len=sequence.cached_len,
                logprobs=(_cut(logprobs[row], num_kept, of=count),) if row in logprobs else (),
            )
        )
        if is_end:
            ended.append((sequence, stop_id))
        else:
            ask_mask(state, sequence)
            settle(state, sequence)
    if outputs:
        state.effects.append(StepOutput(iteration=result.iteration, sequences=tuple(outputs)))
    for sequence, stop_id in ended:
        finish(state, sequence, "length" if stop_id is None else "stop", stop_id=stop_id)


def _append(sequence: Sequence, token_ids: list[int]) -> tuple[int, int | None, bool]:
    """Appends the tokens up to an end: how many, the id that ended it, and whether it is at its
    end.
    """
    for num_kept, token_id in enumerate(token_ids, start=1):
        sequence.tokens.append(token_id)
        num_outputs = sequence.num_outputs
        if token_id in sequence.end_ids and num_outputs > sequence.min_tokens:
            return num_kept, token_id, True
        if num_outputs >= sequence.max_tokens:
            return num_kept, None, True
    return len(token_ids), None, False


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


def _land(state: SchedulerState, sequence: Sequence, flight: Flight, *, advance: int) -> None:
    """One flight is back: the committed clock advances and whole committed pages enter the tree."""
    sequence.flights.land(flight)
    sequence.failures = 0
    if sequence.phase is not Phase.RUNNING:
        return  # retracted: its tokens count, its pages are gone
    if sequence.unpaid:
        charge_prompt(sequence, advance)
    assert sequence.allocation is not None
    page_size = state.spec.page_size
    num_before = sequence.committed_len // page_size
    sequence.committed_len += advance
    num_pages = min(sequence.committed_len, sequence.tokens.num) // page_size
    if num_pages > num_before:
        state.cache.commit(sequence.allocation, sequence.page_keys(page_size), num_pages=num_pages)
        lead(state, sequence)
        if sequence.followers:
            wake(state, sequence)
    state.cache.release_behind(sequence.allocation, sequence.committed_len)
