"""Takes the results of a step: tokens are appended and handed out. Sequences whose last token came
are left to `finish_ended`. advance.py does what follows for the KV.

A result finds its flight by iteration and row, as it was launched. The result of a flight that was
dropped, because its sequence ended or its step failed, is ignored. The only writer of a sequence's
tokens.
"""

from __future__ import annotations

from aserve.messages.base import array_i32
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.messages.results import SampleResult, StepResult
from aserve.scheduling.advance import advance_rows
from aserve.scheduling.ends import count_kept, cut_logprobs, may_end
from aserve.scheduling.finish import finish, settle
from aserve.scheduling.flights import Step, drop_flights, land_without_row
from aserve.scheduling.forced import end_reasoning
from aserve.scheduling.grammar_rows import ask_mask, receive_drafts
from aserve.scheduling.prompts import hand_out_prompts
from aserve.scheduling.request import Phase
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
    table = state.table
    logprobs = {record.row: record for record in result.logprobs}
    rows, counts, tokens = (array_i32(data) for data in (result.rows, result.counts, result.tokens))
    stops = counts.cumsum()
    indices = step.indices_of(rows)
    is_here = table.first_iteration[rows] <= step.iteration
    is_plain = is_here & ~may_end(state, rows, counts, tokens) & (table.has_mask[rows] == 0)
    starts, num_kept = stops - counts, counts.copy()
    num_drafts = step.num_drafts[indices] * state.spec.decode.root_len  # a block has no drafts
    columns = [each.tolist() for each in (indices, rows, starts, stops, is_plain, num_drafts)]
    token_ids = tokens.tolist()
    new: list[SequenceOutput] = []
    for place, (index, row, start, stop, plain, drafts) in enumerate(zip(*columns, strict=True)):
        if start == stop or (not plain and step.is_dropped(index)):
            continue
        sequence = step.sequences[index]
        kept = stop - start if plain else count_kept(sequence, token_ids[start:stop])
        num_kept[place] = kept
        if not kept:
            continue
        outputs = sequence.tokens.outputs
        position = len(outputs)
        outputs.extend(token_ids[start : start + kept])
        sequence.client.serve_outputs(kept)
        new.append(
            SequenceOutput(
                sequence.request_id,
                sequence.child,
                position,
                result.tokens[start * 4 : (start + kept) * 4],
                sequence.cached_len,
                cut_logprobs(logprobs[row], kept, of=stop - start) if row in logprobs else (),
                num_drafts=drafts,
            )
        )
    if new:
        state.effects.append(StepOutput(iteration=result.iteration, sequences=tuple(new)))
    has_tokens = is_here & (num_kept > 0)
    table.num_tokens[rows[is_here]] += num_kept[is_here]
    table.last_id[rows[has_tokens]] = tokens[(starts + num_kept)[has_tokens] - 1]
    here = indices[is_here]
    advance = step.max_advance[here] - step.max_outputs[here] + num_kept[is_here]
    advance_rows(state, step, here, advance=advance)
    state.draft_choice.note_results(table, rows[is_here], num_drafts[is_here], num_kept[is_here])
    for index in indices[~is_plain].tolist():
        if not step.is_dropped(index):
            _settle(state, step, index)


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
