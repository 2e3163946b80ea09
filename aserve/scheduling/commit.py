"""Takes the results of a step: tokens are appended and handed out. Sequences whose last token came
are left to `finish_ended`. advance.py does what follows for the KV.

A result finds its flight by iteration and row, as it was launched. The result of a flight that was
dropped, because its sequence ended or its step failed, is ignored. The only writer of a sequence's
tokens.
"""

from __future__ import annotations

from collections import Counter

from aserve.messages.base import VALUE_BYTES, array_i32, num_values
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.messages.results import SampleResult, StepResult
from aserve.scheduling.advance import advance_rows
from aserve.scheduling.clients import Client
from aserve.scheduling.ends import kept_output, may_end, outputs_of
from aserve.scheduling.finish import finish, settle
from aserve.scheduling.flights import Step, drop_flights, land_without_row
from aserve.scheduling.forced import end_reasoning
from aserve.scheduling.grammar_rows import ask_mask, receive_drafts
from aserve.scheduling.prompts import hand_out_prompts
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.state import SchedulerState


def commit_step(state: SchedulerState, result: StepResult) -> None:
    state.landed = result.iteration
    step = state.steps.pop(result.iteration, None)
    if step is None:
        return  # dropped by a failure before it
    state.draft_choice.note_time(result.iteration, result.took_us)
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
    chunks = (~step.samples).nonzero()[0]
    is_here = state.table.first_iteration[step.rows[chunks]] <= step.iteration
    dropped = [index for index in chunks[~is_here].tolist() if step.is_dropped(index)]
    advance_rows(state, step, chunks[is_here], advance=step.max_advance[chunks[is_here]])
    for index in chunks.tolist():
        if index in dropped:
            continue
        sequence = step.sequences[index]
        if sequence.phase is Phase.LINGERING:
            land_without_row(step, index)
        if not sequence.max_tokens and not sequence.remaining and not sequence.num_flights:
            finish(state, sequence, "length")
        else:
            settle(state, sequence)


def commit_tokens(state: SchedulerState, result: StepResult | SampleResult, step: Step) -> None:
    """PERF: rows that only advance are committed by columns. The others are looked at one by one:
    their results were dropped, they may end here, or they have a mask or no row.
    """
    table = state.table
    rows, counts, tokens = (array_i32(data) for data in (result.rows, result.counts, result.tokens))
    indices, ends = step.indices_of(rows), counts.cumsum()
    is_here = table.first_iteration[rows] <= step.iteration
    is_plain = is_here & (counts > 0) & ~may_end(state, rows, counts, tokens)
    num_drafts = step.num_drafts[indices] * state.spec.decode.root_len  # a block has no drafts
    sequences = [step.sequences[index] for index in indices.tolist()]
    outputs: list[SequenceOutput | None] = [*(whole := outputs_of(table, result, num_drafts))]
    looked_at, num_kept = (~is_plain).nonzero()[0], counts.copy()
    for place, index in zip(looked_at.tolist(), indices[looked_at].tolist(), strict=True):
        is_dropped = step.is_dropped(index)
        output = None if is_dropped else kept_output(sequences[place], whole[place])
        outputs[place], num_kept[place] = output, num_values(output.token_ids) if output else 0
    _append(state, result.iteration, sequences, outputs)
    looked_at = indices[looked_at]
    if len(looked_at):
        rows, indices, num_drafts = rows[is_here], indices[is_here], num_drafts[is_here]
        ends, num_kept = (ends - counts + num_kept)[is_here], num_kept[is_here]
    has_tokens = num_kept > 0
    table.num_tokens[rows] += num_kept
    table.last_id[rows[has_tokens]] = tokens[ends[has_tokens] - 1]
    advance = step.max_advance[indices] - step.max_outputs[indices] + num_kept
    advance_rows(state, step, indices, advance=advance)
    state.draft_choice.note_results(table, rows, num_drafts, num_kept)
    for index in looked_at.tolist():
        if not step.is_dropped(index):
            _settle(state, step, index)


def _append(
    state: SchedulerState,
    iteration: int,
    sequences: list[Sequence],
    outputs: list[SequenceOutput | None],
) -> None:
    """Appends the outputs to the logs of their sequences, and hands them out."""
    served: Counter[Client] = Counter()
    for sequence, output in zip(sequences, outputs, strict=True):
        if output is not None:
            sequence.tokens.outputs.frombytes(output.token_ids)
            served[sequence.client] += len(output.token_ids)
    for client, num_bytes in served.items():
        client.serve_outputs(num_bytes // VALUE_BYTES)
    if served:
        state.effects.append(StepOutput(iteration, tuple(filter(None, outputs))))


def _settle(state: SchedulerState, step: Step, index: int) -> None:
    """Ends a sequence at its last token, else its reasoning at the limit, and asks for the mask of
    its next token. Called for those that have a mask or no row, or that may be at such an end.
    """
    sequence = step.sequences[index]
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
