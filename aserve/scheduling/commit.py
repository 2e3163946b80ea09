"""Takes the results of a step: tokens are appended, committed lengths advance, and whole pages
enter the prefix tree. Sequences whose last token came are left to `finish_ended`.

A result finds its flight by iteration and row, as it was launched. The result of a flight that was
dropped, because its sequence ended or its step failed, is ignored. The only writer of a sequence's
tokens.
"""

from __future__ import annotations

from aserve.messages.base import array_i32
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.messages.results import RowLogprobs, SampleResult, StepResult
from aserve.scheduling.finish import finish, settle
from aserve.scheduling.followers import lead, wake
from aserve.scheduling.grammar_rows import ask_mask
from aserve.scheduling.prompts import hand_out_prompts
from aserve.scheduling.request import Flight, Phase, Sequence
from aserve.scheduling.state import SchedulerState


def commit_step(state: SchedulerState, result: StepResult) -> None:
    state.landed = result.iteration
    step = state.steps.pop(result.iteration, None)
    if step is None:
        return  # dropped by a failure before it
    if result.prompt_logprobs or result.embeddings:
        hand_out_prompts(state, result, step.rows)
    for flight in step.rows.values():
        if not flight.samples and not flight.is_dropped:
            _commit_chunk(state, flight)
    commit_tokens(state, result, step.rows)


def commit_samples(state: SchedulerState, result: SampleResult) -> None:
    rows: dict[int, Flight] = {}
    for row in array_i32(result.rows).tolist():
        flight = state.samples.pop((result.iteration, row), None)
        if flight is not None:
            rows[row] = flight
    commit_tokens(state, result, rows)


def _commit_chunk(state: SchedulerState, flight: Flight) -> None:
    """A chunk whose KV is there, and of which nothing was sampled."""
    sequence = flight.sequence
    _land(state, flight, advance=flight.max_advance)
    if flight.ends:
        finish(state, sequence, "length")
    else:
        settle(state, sequence)


def commit_tokens(
    state: SchedulerState, result: StepResult | SampleResult, rows: dict[int, Flight]
) -> None:
    logprobs = {record.row: record for record in result.logprobs}
    tokens = array_i32(result.tokens).tolist()
    outputs: list[SequenceOutput] = []
    stop = 0
    for row, count in zip(
        array_i32(result.rows).tolist(), array_i32(result.counts).tolist(), strict=True
    ):
        start, stop = stop, stop + count
        flight = rows.get(row)
        if flight is None or flight.is_dropped:
            continue
        sequence = flight.sequence
        position = sequence.num_outputs
        num_kept, stop_id, is_end = _append(sequence, tokens[start:stop])
        sequence.client.serve_outputs(num_kept)
        _land(state, flight, advance=flight.max_advance - flight.max_outputs + count)
        if count:
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
            sequence.has_ended = True
            sequence.drop_flights()
            state.ended.append((sequence, stop_id))
            continue
        if sequence.mask is not None:
            ask_mask(state, sequence)
        if sequence.phase is Phase.LINGERING:
            settle(state, sequence)
    if outputs:
        state.effects.append(StepOutput(iteration=result.iteration, sequences=tuple(outputs)))


def _append(sequence: Sequence, token_ids: list[int]) -> tuple[int, int | None, bool]:
    """Appends the tokens up to an end. Returns how many, the id that ended it, and whether it is at
    its end.
    """
    tokens, end_ids = sequence.tokens, sequence.end_ids
    for num_kept, token_id in enumerate(token_ids, start=1):
        tokens.append(token_id)
        if token_id in end_ids and sequence.num_outputs > sequence.min_tokens:
            return num_kept, token_id, True
        if tokens.num >= sequence.max_len:
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


def _land(state: SchedulerState, flight: Flight, *, advance: int) -> None:
    """One flight is back: the committed length advances, and new whole pages enter the tree."""
    sequence = flight.sequence
    sequence.failures = 0
    if sequence.phase is not Phase.RUNNING:
        sequence.land(flight, advance=0)
        return  # retracted: its tokens count, its pages are gone
    assert sequence.allocation is not None
    if sequence.unpaid:
        _charge_prompt(sequence, advance)
    page_size = state.spec.page_size
    num_before = (sequence.committed_len - sequence.key_lookahead) // page_size  # at least
    sequence.land(flight, advance=advance)
    if sequence.committed_len // page_size > num_before:
        _commit_pages(state, sequence)
    if state.cache.has_windows:
        state.cache.release_behind(sequence.allocation, sequence.committed_len)


def _commit_pages(state: SchedulerState, sequence: Sequence) -> None:
    """The row has committed one more whole page, or several."""
    assert sequence.allocation is not None
    page_size = state.spec.page_size
    num_pages = sequence.cacheable_len // page_size
    state.cache.commit(sequence.allocation, sequence.page_keys(page_size), num_pages=num_pages)
    lead(state, sequence)
    if sequence.followers:
        wake(state, sequence)


def _charge_prompt(sequence: Sequence, num_computed: int) -> None:
    """A prompt token is charged once, however often it is computed again after a retraction."""
    num_charged = min(sequence.unpaid, num_computed)
    sequence.unpaid -= num_charged
    sequence.client.serve_prompt(num_charged)
