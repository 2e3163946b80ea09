"""Takes the results of a step: tokens are appended and handed out. Sequences whose last token came
are left to `finish_ended`. advance.py does what follows for the KV.

A result finds its flight by iteration and row, as it was launched. The result of a flight that was
dropped, because its sequence ended or its step failed, is ignored. Sampled tokens are appended by
token_writes.py, which it calls, and by repeated_results.py.
"""

from __future__ import annotations

import numpy as np

from aserve.messages.base import array_i32
from aserve.messages.output import StepOutput
from aserve.messages.results import SampleResult, StepResult
from aserve.scheduling import token_writes
from aserve.scheduling.advance import advance_rows
from aserve.scheduling.ends import cut_outputs, may_end, next_tokens_of, outputs_of
from aserve.scheduling.finish import finish, settle
from aserve.scheduling.flights import Step, drop_flights, land_without_row
from aserve.scheduling.forced import end_reasoning
from aserve.scheduling.grammar_rows import ask_mask, receive_drafts
from aserve.scheduling.prompts import hand_out_prompts
from aserve.scheduling.repeated_results import land_repeated
from aserve.scheduling.request import Phase
from aserve.scheduling.state import SchedulerState


def commit_step(state: SchedulerState, result: StepResult) -> None:
    state.landed = result.iteration
    step = state.steps.pop(result.iteration, None)
    if step is None:
        return  # dropped by a failure before it
    state.draft_choice.note_time(result.iteration, result.took_us)
    if land_repeated(state, step, result):
        return
    if result.prompt_logprobs or result.embeddings:
        hand_out_prompts(state, result, step)
    _commit_chunks(state, step)
    commit_tokens(state, result, step)
    for drafts in result.drafts:
        receive_drafts(state, step, drafts)


def commit_samples(state: SchedulerState, result: SampleResult) -> None:
    """A failure drops all the samples of a step, or none."""
    steps = [
        state.samples.pop((result.iteration, row), None) for row in array_i32(result.rows).tolist()
    ]
    if steps and steps[0] is not None:
        commit_tokens(state, result, steps[0])


def _commit_chunks(state: SchedulerState, step: Step) -> None:
    """Commits the KV of chunks that sampled nothing."""
    if step.samples.all():
        return
    chunks = step.part((~step.samples).nonzero()[0])
    is_here = state.table.first_iteration[chunks.rows] <= step.iteration
    is_dropped = [chunks.is_dropped(index) for index in range(len(chunks.rows))]
    here = chunks if is_here.all() else chunks.part(is_here.nonzero()[0])
    advance_rows(state, here, advance=here.max_advance)
    for index, sequence in enumerate(chunks.sequences):
        if is_dropped[index]:
            continue
        if sequence.phase is Phase.LINGERING:
            land_without_row(chunks, index)
        if not sequence.max_tokens and not sequence.remaining and not sequence.num_flights:
            finish(state, sequence, "length")
        else:
            settle(state, sequence)


def commit_tokens(state: SchedulerState, result: StepResult | SampleResult, step: Step) -> None:
    """PERF: rows that only advance are committed by columns. The others are looked at one by one:
    their results were dropped, they may end here, or they have a mask or no row.
    """
    table, step = state.table, step.of(result.rows)
    rows, counts, tokens = step.rows, array_i32(result.counts), array_i32(result.tokens)
    is_single = len(tokens) == len(counts) == np.count_nonzero(counts)
    is_dropped = table.first_iteration[rows] > step.iteration  # or it has no row
    is_odd = may_end(state, rows, counts, tokens) | is_dropped
    if not is_single:
        is_odd |= counts == 0
    looked_at = is_odd.nonzero()[0].tolist()
    has_tokens_only = is_single and not result.logprobs and not np.count_nonzero(step.num_drafts)
    alone = looked_at if has_tokens_only else [*range(len(rows))]
    outputs = outputs_of(state, step, result, alone) if alone else {}
    num_kept = cut_outputs(step, outputs, counts, looked_at) if looked_at else counts
    next_tokens = None
    if is_single and len(looked_at) < len(rows):
        plain = (~is_odd).nonzero()[0] if looked_at else slice(None)
        if has_tokens_only:
            next_tokens = next_tokens_of(table, rows[plain], tokens[plain])
        token_writes.append_columns(state, rows[plain], tokens[plain])
    token_writes.append_outputs(step, outputs, looked_at if is_single else alone)
    given = tuple(filter(None, outputs.values()))
    if given or next_tokens is not None:
        state.effects.append(StepOutput(step.iteration, given, next_tokens))
    last_ids = tokens if is_single else token_writes.last_kept(tokens, counts, num_kept)
    here = step
    if looked_at and np.count_nonzero(is_dropped):
        here = step.part((~is_dropped).nonzero()[0])
        num_kept, last_ids = num_kept[~is_dropped], last_ids[~is_dropped]
    advance = token_writes.write_columns(state, here, num_kept, last_ids=last_ids)
    advance_rows(state, here, advance=advance)
    for index in looked_at:
        if not step.is_dropped(index):
            _settle(state, step, index)


def _settle(state: SchedulerState, step: Step, index: int) -> None:
    """Ends a sequence at its last token, else its reasoning at the limit, and asks for the mask of
    its next token. Called for those that have a mask or no row, or that may be at such an end.
    """
    sequence, state.repeat = step.sequences[index], None
    if sequence.phase is Phase.LINGERING:
        land_without_row(step, index)
    if not sequence.is_at_end:
        end_reasoning(state, sequence)
    if sequence.is_at_end:
        sequence.has_ended = True
        drop_flights(sequence)
        sequence.is_blocked = True
        state.ended.append(sequence)
        return
    if sequence.mask is not None:
        ask_mask(state, sequence)
    settle(state, sequence)
