"""What a step owes the prompts of its rows: scores of prompt tokens, and embeddings of whole ones.

Host values only, derived from the batch and never changed; it knows no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.step import ScheduleBatch


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Places count among the step's tokens; those of one row follow each other."""

    scored_rows: ArrayI32  # [scored rows]
    counts: ArrayI32  # [scored rows], scored tokens of each
    positions: ArrayI32  # [scored rows], where in the prompt the first of them stands
    num_top: ArrayI32  # [scored rows], alternatives wanted for each token
    max_top: int  # of the row that wants most
    indices: ArrayI32  # [scored tokens], of the token before each, whose logits score it
    token_ids: ArrayI32  # [scored tokens]
    slices: tuple[slice, ...]  # of the scored tokens, at least one, which may be empty
    embedded_rows: ArrayI32  # [embedded rows]
    last_places: ArrayI32  # [embedded rows], of the last token of each prompt

    def stage(self, arrays: HostArrays) -> None:
        arrays.add("scored_places", self.indices)
        arrays.add("scored_ids", self.token_ids)
        arrays.add("embedded_places", self.last_places)


def plan_prompts(
    batch: ScheduleBatch, row_params: RowParams, *, vocab_size: int, slice_len: int
) -> PromptPlan | None:
    """None when no row of the step has such a prompt, or all are beyond it. `row_params` know the
    batch's row_inits already. A length that is only a bound is one of a row beyond its prompt.
    """
    if not row_params.have_prompt_wants:
        return None
    rows, query_lens, kv_lens = map(array_i32, (batch.rows, batch.query_lens, batch.kv_lens))
    ends = np.cumsum(query_lens, dtype=np.int32)
    counts = (row_params.scored_lens(rows) - kv_lens).clip(0, query_lens)
    scored = np.flatnonzero(counts)
    embedded = np.flatnonzero(row_params.embedded_lens(rows) == kv_lens + query_lens)
    if not len(scored) and not len(embedded):
        return None
    indices = _ranges((ends - query_lens)[scored], counts[scored])
    num_top = row_params.num_prompt_logprobs(rows[scored])
    return PromptPlan(
        scored_rows=rows[scored],
        counts=counts[scored],
        positions=kv_lens[scored] + 1,
        num_top=num_top,
        max_top=min(int(num_top.max(initial=0)), vocab_size),
        indices=indices,
        token_ids=_next_tokens(batch, ends)[indices],
        slices=tuple(
            slice(start, start + slice_len) for start in range(0, max(len(indices), 1), slice_len)
        ),
        embedded_rows=rows[embedded],
        last_places=ends[embedded] - 1,
    )


def _ranges(starts: ArrayI32, counts: ArrayI32) -> ArrayI32:
    """start, start + 1, ... of each, one after the other."""
    before = np.cumsum(counts, dtype=np.int32) - counts
    ranges: ArrayI32 = np.arange(counts.sum(), dtype=np.int32) + np.repeat(starts - before, counts)
    return ranges


def _next_tokens(batch: ScheduleBatch, ends: ArrayI32) -> ArrayI32:
    """[tokens]: what follows each token of the step; known wherever a prompt goes on."""
    following: ArrayI32 = np.roll(array_i32(batch.input_ids), -1)
    following[ends - 1] = array_i32(batch.next_ids)
    return following
