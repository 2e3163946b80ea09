"""A ScheduleBatch as numpy arrays: which tokens belong to whom, and which of them give logits.

Host values only, derived from the batch and never changed; it knows no tensor.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from aserve.errors import BugError
from aserve.gpu.sampling.plan import RowParams, SamplePlan
from aserve.gpu.step.prompt_plan import PromptPlan, plan_prompts
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.requests import stamp_of
from aserve.messages.step import ScheduleBatch


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """The tokens whose logits are needed, in slices. A sampled row has a window of 1 + its
    drafts.
    """

    rows: ArrayI32  # [samples]
    windows: ArrayI32  # [samples]
    tokens: ArrayI32  # [logits], places among the step's tokens
    slices: tuple[SamplePlan, ...]
    num_logprobs: ArrayI32  # [samples], -1 for none

    def stage(self, arrays: HostArrays) -> None:
        arrays.add("sample_rows", self.rows)
        arrays.add("windows", self.windows)
        arrays.add("logits_tokens", self.tokens)
        for number, plan in enumerate(self.slices):
            plan.stage(arrays, f"slice{number}")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """[rows] int32 each, unless said otherwise."""

    batch: ScheduleBatch
    rows: ArrayI32
    query_lens: ArrayI32
    kv_lens: ArrayI32  # before this step: exact or a bound
    is_bound: ArrayI32
    len_bounds: ArrayI32  # no row is longer after this step
    is_exact: bool  # the bounds are the lengths themselves
    expects: ArrayI32
    num_drafts: ArrayI32
    token_to_row: ArrayI32  # [tokens], each token's place among the rows
    offsets: ArrayI32  # [tokens], its place in its row's span
    input_ids: ArrayI32  # [tokens]
    next_ids: ArrayI32
    held_rows: ArrayI32  # [held]
    held_tokens: ArrayI32  # [held], the last token of each held row
    logits: LogitsPlan
    prompts: PromptPlan | None
    attention_plan: object | None = None  # of a capture, if attention plans on the host

    @property
    def iteration(self) -> int:
        return self.batch.iteration

    def padded(self, num_rows: int) -> StepPlan:
        """With padding rows up to `num_rows`, as wide as the others: row 0, of no length. Only for
        a step whose rows are all as wide, and all sampled.
        """
        more = num_rows - len(self.rows)
        if not more:
            return self
        width = int(self.query_lens[0])
        num_tokens = num_rows * width
        logits = self.logits
        indices = np.arange(num_rows, dtype=np.int32)
        return dataclasses.replace(
            self,
            rows=_longer(self.rows, more),
            query_lens=_longer(self.query_lens, more, width),
            kv_lens=_longer(self.kv_lens, more),
            is_bound=_longer(self.is_bound, more),
            len_bounds=_longer(self.len_bounds, more, width),
            expects=_longer(self.expects, more),
            num_drafts=_longer(self.num_drafts, more, width - 1),
            token_to_row=np.repeat(indices, width),
            offsets=np.tile(np.arange(width, dtype=np.int32), num_rows),
            input_ids=_longer(self.input_ids, more * width),
            next_ids=_longer(self.next_ids, more),
            logits=dataclasses.replace(
                logits,
                rows=_longer(logits.rows, more),
                windows=_longer(logits.windows, more, width),
                tokens=np.arange(num_tokens, dtype=np.int32),
                num_logprobs=_longer(logits.num_logprobs, more, -1),
            ),
        )

    def stage(self, arrays: HostArrays) -> None:
        arrays.add("iteration", np.array([stamp_of(self.iteration)], np.int32))
        arrays.add("rows", self.rows)
        arrays.add("query_lens", self.query_lens)
        arrays.add("kv_lens", self.kv_lens)
        arrays.add("is_bound", self.is_bound)
        arrays.add("num_drafts", self.num_drafts)
        arrays.add("token_to_row", self.token_to_row)
        arrays.add("offsets", self.offsets)
        arrays.add("input_ids", self.input_ids)
        arrays.add("next_ids", self.next_ids)
        arrays.add("held_rows", self.held_rows)
        arrays.add("held_tokens", self.held_tokens)
        self.logits.stage(arrays)
        if self.prompts is not None:
            self.prompts.stage(arrays)


def plan_step(
    batch: ScheduleBatch, row_params: RowParams, *, vocab_size: int, slice_len: int
) -> StepPlan:
    """`row_params` know the batch's row_inits already. Logits of `slice_len` tokens at most are
    alive at a time.
    """
    rows = array_i32(batch.rows)
    query_lens = array_i32(batch.query_lens)
    kv_lens = array_i32(batch.kv_lens)
    is_bound = np.frombuffer(batch.bounds, np.uint8).astype(np.int32)
    ends = np.cumsum(query_lens, dtype=np.int32)
    token_to_row = np.repeat(np.arange(len(rows), dtype=np.int32), query_lens)
    num_drafts = np.zeros_like(rows) if batch.verify is None else array_i32(batch.verify.num_drafts)
    sampled = _places(rows, array_i32(batch.sample_rows))
    held = _places(rows, array_i32(batch.held_rows))
    _check(batch, rows, query_lens)
    return StepPlan(
        batch=batch,
        rows=rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
        is_bound=is_bound,
        len_bounds=kv_lens + query_lens,
        is_exact=not is_bound.any(),
        expects=array_i32(batch.expects),
        num_drafts=num_drafts,
        token_to_row=token_to_row,
        offsets=np.arange(len(token_to_row), dtype=np.int32) - (ends - query_lens)[token_to_row],
        input_ids=array_i32(batch.input_ids),
        next_ids=array_i32(batch.next_ids),
        held_rows=rows[held],
        held_tokens=ends[held] - 1,
        logits=plan_logits(
            rows[sampled],
            ends[sampled],
            1 + num_drafts[sampled],
            row_params,
            max_len=int((kv_lens + query_lens).max(initial=0)),
            vocab_size=vocab_size,
            slice_len=slice_len,
        ),
        prompts=plan_prompts(batch, row_params, vocab_size=vocab_size, slice_len=slice_len),
    )


def plan_logits(
    rows: ArrayI32,
    ends: ArrayI32,
    windows: ArrayI32,
    row_params: RowParams,
    *,
    max_len: int,
    vocab_size: int,
    slice_len: int,
) -> LogitsPlan:
    """ends [samples]: where each row's tokens end; the last `windows` of them give logits."""
    last = np.cumsum(windows, dtype=np.int32)
    tokens = np.arange(windows.sum(), dtype=np.int32) + np.repeat(ends - last, windows)
    of_logits = np.repeat(rows, windows)
    return LogitsPlan(
        rows=rows,
        windows=windows,
        tokens=tokens,
        slices=tuple(
            row_params.plan(
                of_logits[start : start + slice_len], max_len=max_len, vocab_size=vocab_size
            )
            for start in range(0, len(of_logits), slice_len)
        ),
        num_logprobs=row_params.num_logprobs(rows),
    )


def _longer(values: ArrayI32, more: int, value: int = 0) -> ArrayI32:
    longer = np.full(len(values) + more, value, np.int32)
    longer[: len(values)] = values
    return longer


def _places(rows: ArrayI32, named: ArrayI32) -> ArrayI32:
    """Where the named rows stand; both are in the same order. Mostly all are named, or none."""
    if len(named) in (0, len(rows)):
        return np.arange(len(named), dtype=np.int32)
    return np.flatnonzero(np.isin(rows, named)).astype(np.int32)


def _check(batch: ScheduleBatch, rows: ArrayI32, query_lens: ArrayI32) -> None:
    num_ids = len(array_i32(batch.input_ids))
    if (
        num_ids != int(query_lens.sum())
        or (query_lens < 1).any()
        or np.bincount(rows)[1:].max(initial=0) > 1
    ):
        raise BugError(
            f"step {batch.iteration} is not one batch: rows {rows}, query_lens {query_lens}, "
            f"{num_ids} ids"
        )
