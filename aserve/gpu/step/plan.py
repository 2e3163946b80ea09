"""`StepPlan`: a ScheduleBatch as numpy arrays, and the tokens of the step that need logits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aserve.errors import BugError
from aserve.gpu.sampling.plan import RowParams, SamplePlan
from aserve.gpu.step.prompts import PromptPlan, plan_prompts
from aserve.gpu.transfer.staging import ArrayI64, HostArrays
from aserve.messages.base import ArrayI32, array_i32, num_values
from aserve.messages.step import ScheduleBatch, stamp_of


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """The tokens whose logits are needed. Logits are computed slice by slice, which bounds their
    memory. The window of a sampled row is its last token and its drafts.
    """

    rows: ArrayI32  # [samples]
    windows: ArrayI32  # [samples]
    tokens: ArrayI32  # [logits], indices into the step's tokens
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
    """Arrays are int32 [rows] unless their comment says otherwise."""

    batch: ScheduleBatch
    rows: ArrayI32
    query_lens: ArrayI32
    kv_lens: ArrayI32  # KV lengths before this step, exact or upper bounds
    is_bound: ArrayI32  # 1 where kv_lens is an upper bound
    len_bounds: ArrayI32  # upper bounds of the KV lengths after this step
    is_exact: bool  # len_bounds are the lengths themselves
    expects: ArrayI32  # stamp of the step whose relay values the row reads, 0 for none
    num_drafts: ArrayI32
    token_to_row: ArrayI32  # [tokens], index into rows
    offsets: ArrayI32  # [tokens], index of the token among its row's queries
    input_ids: ArrayI32  # [tokens]
    next_ids: ArrayI32
    held_rows: ArrayI32  # [held]
    held_windows: ArrayI32  # [held]
    held_tokens: ArrayI32  # [sum of held_windows], the last tokens of each held row
    logits: LogitsPlan
    prompts: PromptPlan | None
    attention_plan: object | None = (
        None  # made before a graph capture, if attention plans on the host
    )

    @property
    def iteration(self) -> int:
        return self.batch.iteration

    def padded(self, num_rows: int) -> StepPlan:
        """Returns this plan with padding rows (row 0, KV length 0) up to `num_rows` rows. All rows
        of the step must have the same number of tokens, and all must be sampled.
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

    def with_exact_lens(self, kv_lens: ArrayI32) -> StepPlan:
        """Returns this plan once the host knows the lengths that were bounds, [rows]."""
        return dataclasses.replace(
            self,
            kv_lens=kv_lens,
            is_bound=np.zeros_like(self.is_bound),
            len_bounds=kv_lens + self.query_lens,
            is_exact=True,
        )

    def stage(self, arrays: HostArrays) -> None:
        arrays.add("iteration", np.array([stamp_of(self.iteration)], np.int32))
        arrays.add("rows", self.rows)
        arrays.add("query_lens", self.query_lens)
        arrays.add("kv_lens", self.kv_lens)
        arrays.add("is_bound", self.is_bound)
        arrays.add("num_drafts", self.num_drafts)
        arrays.add("drafting", np.flatnonzero(self.num_drafts).astype(np.int32))
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
    """`row_params` must already hold the batch's row_inits. Logits are computed for at most
    `slice_len` tokens at a time.
    """
    rows = array_i32(batch.rows)
    query_lens = array_i32(batch.query_lens)
    kv_lens = array_i32(batch.kv_lens)
    is_bound = np.frombuffer(batch.bounds, np.uint8).astype(np.int32)
    ends = query_lens.cumsum(dtype=np.int32)
    token_to_row = np.arange(len(rows), dtype=np.int32).repeat(query_lens)
    verify = batch.verify
    num_drafts = np.zeros(len(rows), np.int32) if verify is None else array_i32(verify.num_drafts)
    windows = np.minimum(1 + num_drafts, query_lens)
    sampled = _indices_of(rows, array_i32(batch.sample_rows))
    held = _indices_of(rows, array_i32(batch.held_rows))
    len_bounds = kv_lens + query_lens
    _check(batch, rows, query_lens)
    return StepPlan(
        batch=batch,
        rows=rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
        is_bound=is_bound,
        len_bounds=len_bounds,
        is_exact=not np.count_nonzero(is_bound),
        expects=array_i32(batch.expects),
        num_drafts=num_drafts,
        token_to_row=token_to_row,
        offsets=np.arange(len(token_to_row), dtype=np.int32) - (ends - query_lens)[token_to_row],
        input_ids=array_i32(batch.input_ids),
        next_ids=array_i32(batch.next_ids),
        held_rows=rows[held],
        held_windows=windows[held],
        held_tokens=_window_tokens(ends[held], windows[held]),
        logits=plan_logits(
            rows[sampled],
            ends[sampled],
            windows[sampled],
            row_params,
            max_len=int(np.maximum.reduce(len_bounds, initial=0)),
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
    """ends [samples]: the index after each row's last token. The last `windows` tokens of a row
    need logits. A slice has whole windows."""
    return LogitsPlan(
        rows=rows,
        windows=windows,
        tokens=_window_tokens(ends, windows),
        slices=tuple(
            row_params.plan(part, max_len=max_len, vocab_size=vocab_size)
            for part in _slices(rows, windows, slice_len=slice_len)
        ),
        num_logprobs=row_params.num_logprobs(rows),
    )


def _slices(rows: ArrayI32, windows: ArrayI32, *, slice_len: int) -> list[ArrayI32]:
    """Returns the row of each logits row, in slices of whole windows, which are not empty."""
    parts = [rows.repeat(windows)]
    if len(parts[0]) > slice_len:
        stops = windows.cumsum()
        least = max(1, slice_len - int(windows.max()) + 1)
        parts = np.split(parts[0], stops[:-1][np.diff((stops - 1) // least) > 0])
    return [part for part in parts if len(part)]


def _window_tokens(ends: ArrayI32, windows: ArrayI32) -> ArrayI32:
    """Returns the indices of the last `windows` tokens before each end."""
    starts = (ends - windows.cumsum(dtype=np.int32)).repeat(windows)
    tokens: ArrayI32 = np.arange(len(starts), dtype=np.int32) + starts
    return tokens


def _longer(values: ArrayI32, more: int, value: int = 0) -> ArrayI32:
    longer = np.full(len(values) + more, value, np.int32)
    longer[: len(values)] = values
    return longer


def _indices_of(rows: ArrayI32, named: ArrayI32) -> ArrayI32:
    """Returns the indices of `named` in `rows`; both have the same order.

    PERF: most steps name all rows or none.
    """
    if len(named) in (0, len(rows)):
        return np.arange(len(named), dtype=np.int32)
    return are_among(rows, named).nonzero()[0].astype(np.int32)


def are_among(rows: ArrayI32 | ArrayI64, named: ArrayI32) -> npt.NDArray[np.bool_]:
    """Returns whether each of the rows is one of `named`, which are some of them.

    PERF: np.isin, which sorts, takes three times as long for 16 rows.
    """
    is_named = np.zeros(1 + int(rows.max(initial=0)), np.bool_)
    is_named[named] = True
    are_named: npt.NDArray[np.bool_] = is_named[rows]
    return are_named


def _check(batch: ScheduleBatch, rows: ArrayI32, query_lens: ArrayI32) -> None:
    num_ids = num_values(batch.input_ids)
    if (
        num_ids != int(np.add.reduce(query_lens))
        or np.count_nonzero(query_lens < 1)
        or np.count_nonzero(np.bincount(rows)[1:] > 1)
    ):
        raise BugError(
            f"step {batch.iteration} is not one batch: rows {rows}, query_lens {query_lens}, "
            f"{num_ids} ids"
        )
