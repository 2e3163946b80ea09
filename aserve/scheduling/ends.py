"""Finds the sequences that end with the new tokens of a step, and what of these they keep as
output. The limit of reasoning is such an end, behind which other tokens follow.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
import numpy.typing as npt

from aserve.messages.base import VALUE_BYTES, ArrayI32, array_i32, num_values, pack_i32, split_i32
from aserve.messages.output import NextTokens, SequenceOutput
from aserve.messages.results import RowLogprobs, SampleResult, StepResult
from aserve.scheduling.flights import Step
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column, RowTable
from aserve.scheduling.state import SchedulerState


def may_end(
    state: SchedulerState, rows: Column, counts: ArrayI32, tokens: ArrayI32
) -> npt.NDArray[np.bool_]:
    """Returns whether the sequence of each row may end with its `counts` new tokens, or has a mask.
    It is a quick test: an id that ends any sequence counts for all of them.
    """
    table = state.table
    is_near: npt.NDArray[np.bool_] = table.num_tokens[rows] + counts >= table.look_len[rows]
    is_end = state.end_ids[tokens]
    if np.count_nonzero(is_end):
        is_near[np.arange(len(rows)).repeat(counts)[is_end]] = True
    return is_near


def next_tokens_of(table: RowTable, rows: Column, token_ids: ArrayI32) -> NextTokens:
    """Returns the output of rows that get one token each, and nothing else with it."""
    return NextTokens(
        tuple(table.request_ids[rows].tolist()),
        pack_i32(table.child[rows]),
        pack_i32(_positions(table, rows)),
        token_ids.tobytes(),
        pack_i32(table.cached_len[rows]),
    )


def outputs_of(
    state: SchedulerState, step: Step, result: StepResult | SampleResult, indices: list[int]
) -> dict[int, SequenceOutput | None]:
    """Returns the output of each of these rows of the step, as if it kept all its new tokens."""
    table, rows = state.table, step.rows[indices]
    token_ids = _split(result.tokens, array_i32(result.counts))
    logprobs = {record.row: (record,) for record in result.logprobs}
    columns = [
        table.request_ids[rows].tolist(),
        table.child[rows].tolist(),
        _positions(table, rows).tolist(),
        [token_ids[index] for index in indices],
        table.cached_len[rows].tolist(),
    ]
    num_drafts = step.num_drafts[indices] * state.spec.decode.root_len  # a block has no drafts
    outputs = map(
        SequenceOutput,
        *columns,
        [logprobs.get(row, ()) for row in rows.tolist()],
        *(repeat(None), repeat(None)),  # what a step computed for a prompt
        num_drafts.tolist(),
    )
    return dict(zip(indices, outputs, strict=True))


def cut_outputs(
    step: Step, outputs: dict[int, SequenceOutput | None], counts: ArrayI32, indices: list[int]
) -> ArrayI32:
    """Cuts the outputs of these rows of the step, which have `counts` tokens, to what is kept of
    them, None for nothing. Returns how many tokens each row of the step keeps.
    """
    num_kept = counts.copy()
    for index in indices:
        whole = None if step.is_dropped(index) else outputs[index]
        output = _kept_output(step.sequences[index], whole) if whole else None
        outputs[index], num_kept[index] = output, num_values(output.token_ids) if output else 0
    return num_kept


def _kept_output(sequence: Sequence, output: SequenceOutput) -> SequenceOutput | None:
    """Returns the part of its new tokens that the sequence keeps, None for none. Only the sequence
    itself knows its position, because it may have no row.
    """
    token_ids = array_i32(output.token_ids).tolist()
    kept = count_kept(sequence, token_ids)
    if not kept:
        return None
    return SequenceOutput(
        sequence.request_id,
        sequence.child,
        sequence.num_outputs,
        output.token_ids[: kept * VALUE_BYTES],
        sequence.cached_len,
        tuple(cut_logprobs(each, kept, of=len(token_ids)) for each in output.logprobs),
        num_drafts=output.num_drafts,
    )


def _positions(table: RowTable, rows: Column) -> Column:
    """Returns the number of outputs that each row has."""
    positions: Column = table.num_tokens[rows] - table.max_len[rows] + table.max_tokens[rows]
    return positions


def _split(tokens: bytes, counts: ArrayI32) -> list[bytes]:
    """Returns the tokens of each row."""
    if len(tokens) == VALUE_BYTES * len(counts) == VALUE_BYTES * np.count_nonzero(counts):
        return split_i32(tokens)
    ends = VALUE_BYTES * counts.cumsum()
    starts = ends - VALUE_BYTES * counts
    return [tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def count_kept(sequence: Sequence, token_ids: list[int]) -> int:
    """Returns how many of the new tokens the sequence keeps: those up to its end or the limit of
    its reasoning, or all.
    """
    num_kept = _num_to_end(sequence, token_ids)
    if sequence.reasoning is None or not sequence.reasoning.is_limited:
        return num_kept
    return sequence.reasoning.read_to_limit(token_ids[:num_kept])


def _num_to_end(sequence: Sequence, token_ids: list[int]) -> int:
    for num_outputs, token_id in enumerate(token_ids, start=sequence.num_outputs + 1):
        is_stop = token_id in sequence.end_ids and num_outputs > sequence.min_tokens
        if is_stop or num_outputs >= sequence.max_tokens:
            return num_outputs - sequence.num_outputs
    return len(token_ids)


def cut_logprobs(logprobs: RowLogprobs, num_kept: int, *, of: int) -> RowLogprobs:
    """Returns the logprobs of the first `num_kept` of `of` tokens."""
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
