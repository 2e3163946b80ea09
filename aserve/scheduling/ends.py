"""Finds the sequences that end with the new tokens of a step, and how many tokens they keep. The
limit of reasoning is such an end, behind which other tokens follow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from aserve.messages.base import ArrayI32
from aserve.messages.results import RowLogprobs
from aserve.scheduling.request import Sequence
from aserve.scheduling.state import SchedulerState


def may_end(
    state: SchedulerState, rows: ArrayI32, counts: ArrayI32, tokens: ArrayI32
) -> npt.NDArray[np.bool_]:
    """Returns whether the sequence of each row may end with its `counts` new tokens. It is a quick
    test: an id that ends any sequence counts for all of them.
    """
    table = state.table
    is_near: npt.NDArray[np.bool_] = table.num_tokens[rows] + counts >= table.max_len[rows]
    is_near |= table.is_limited[rows] > 0
    owners = np.arange(len(rows)).repeat(counts)
    is_near[owners[state.end_ids[tokens]]] = True
    return is_near


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


def cut_logprobs(logprobs: RowLogprobs, num_kept: int, *, of: int) -> tuple[RowLogprobs]:
    """Returns the logprobs of the first `num_kept` of `of` tokens."""
    if num_kept == of:
        return (logprobs,)
    chosen_bytes = len(logprobs.chosen) // of * num_kept
    top_bytes = len(logprobs.top_ids) // of * num_kept
    cut = RowLogprobs(
        row=logprobs.row,
        chosen=logprobs.chosen[:chosen_bytes],
        top_ids=logprobs.top_ids[:top_bytes],
        top_logprobs=logprobs.top_logprobs[:top_bytes],
    )
    return (cut,)
