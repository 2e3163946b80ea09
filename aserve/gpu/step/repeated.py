"""`StepPlanner`: makes the plans of steps, each of what has changed since the last one.

Most decode steps have the same rows as the one before, with new token ids and lengths. Their plans
share all other arrays, and `StepPlan.logits` as a whole: what a reader derives from these holds for
as long as the plans that come have the same `logits`.
"""

from __future__ import annotations

import dataclasses

from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import StepPlan, plan_step
from aserve.messages.base import array_i32
from aserve.messages.step import ScheduleBatch


class StepPlanner:
    __slots__ = ("_last", "_row_params", "_slice_len", "_vocab_size")

    def __init__(self, row_params: RowParams, *, vocab_size: int, slice_len: int) -> None:
        self._row_params = row_params
        self._vocab_size = vocab_size
        self._slice_len = slice_len
        self._last: StepPlan | None = None

    def plan(self, batch: ScheduleBatch) -> StepPlan:
        """The row parameters must already hold the batch's row_inits."""
        last, params = self._last, self._row_params
        if last is None or params.have_prompt_wants or not _is_repeated(last, batch):
            self._last = plan_step(
                batch, params, vocab_size=self._vocab_size, slice_len=self._slice_len
            )
        else:
            self._last = _repeated(last, batch)
        return self._last


def _is_repeated(last: StepPlan, batch: ScheduleBatch) -> bool:
    """Returns whether the batch differs from that of the last plan by token ids and lengths alone.

    NOTE: penalties and bans read a bound of the rows' lengths in the plan of the logits.
    """
    before = last.batch
    return (
        batch.rows == before.rows
        and batch.query_lens == before.query_lens
        and batch.sample_rows == before.sample_rows
        and batch.bounds == before.bounds
        and batch.verify is before.verify is None
        and len(batch.input_ids) == len(before.input_ids)
        and not (batch.row_inits or batch.held_rows or before.held_rows)
        and not any(part.adds_to_logits or part.bans for part in last.logits.slices)
    )


def _repeated(last: StepPlan, batch: ScheduleBatch) -> StepPlan:
    kv_lens = array_i32(batch.kv_lens)
    return dataclasses.replace(
        last,
        batch=batch,
        kv_lens=kv_lens,
        len_bounds=kv_lens + last.query_lens,
        expects=array_i32(batch.expects),
        input_ids=array_i32(batch.input_ids),
        next_ids=array_i32(batch.next_ids),
    )
