"""Builds the graph of one step on MLX arrays: tokens, forward, sampling, and the packed result.

Nothing is computed here. The token that a step samples is a lazy array in the relay, and the next
step's graph begins with it; that the one is not computed yet makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from aserve.gpu.mlx.arrays import ints, with_rows
from aserve.gpu.mlx.decoder import MlxModel
from aserve.gpu.mlx.kv import PagedKv, StepAttention, Table
from aserve.gpu.mlx.sampler import LogitsRows, RowTables, Sampler, score_prompts
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.future_map import NEVER
from aserve.gpu.step.held import HeldRows
from aserve.gpu.step.plan import LogitsPlan, StepPlan, plan_logits
from aserve.gpu.step.results import Layout, check_step
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.step import Sample, ScheduleBatch, stamp_of


@dataclass(frozen=True, slots=True)
class Graph:
    """A step that is built. `arrays` are all that later steps read, and are computed with it."""

    words: mx.array  # int32, as step/results.py reads them
    layout: Layout
    logits: LogitsPlan
    arrays: tuple[mx.array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Rows whose logits wait for their grammar masks."""

    iteration: int
    rows: ArrayI32
    lens: ArrayI32
    logits: mx.array  # [rows, vocab]

    def indices(self, rows: ArrayI32) -> list[int]:
        return [int(np.flatnonzero(self.rows == row)[0]) for row in rows]

    def narrowed(self, rows: ArrayI32) -> _Held:
        indices = self.indices(rows)
        return _Held(self.iteration, rows, self.lens[indices], self.logits[ints(indices)])


class MlxRunner:
    """Written by the executor thread. Its arrays are the relay (`_last_tokens`, one per row), the
    token ids of all slots, and the KV cache. The stamps of the relay are host values, because the
    order in which graphs are built is the order in which they read and write it.
    """

    __slots__ = (
        "_held",
        "_last_tokens",
        "_sampler",
        "_stamps",
        "_tables",
        "_token_ids",
        "kv",
        "model",
    )

    def __init__(self, model: MlxModel, kv: PagedKv, *, max_rows: int, num_slots: int) -> None:
        self.model = model
        self.kv = kv
        self._tables = RowTables(max_rows)
        self._sampler = Sampler(self._tables, self._history)
        self._last_tokens = mx.zeros(max_rows + 1, mx.int32)
        self._token_ids = mx.zeros(num_slots, mx.int32)
        # NOTE: a thread can compute only what was made on its own stream, or is computed already.
        mx.eval(self._last_tokens, self._token_ids)
        self._stamps = np.full(max_rows + 1, NEVER, np.int32)
        self._held: HeldRows[_Held] = HeldRows()

    def apply(self, batch: ScheduleBatch) -> None:
        """Writes what the batch says of its rows: parameters and pages."""
        self._tables.write(batch.row_inits)
        self._stamps[[init.row for init in batch.row_inits]] = NEVER
        self.kv.write_pages(batch.page_writes)

    def step(self, plan: StepPlan, *, wait: Callable[[], None]) -> Graph:
        """`wait` blocks until no step is in flight; few steps call it."""
        stale = check_step(plan, self._stamps[plan.rows], plan.kv_lens)
        if stale is not None:
            raise stale
        self._held.forget(plan.rows)
        attention = self.kv.begin(plan, wait=wait)
        positions = plan.kv_lens[plan.token_to_row] + plan.offsets
        rows = plan.rows[plan.token_to_row]
        input_ids = self._resolved(plan.input_ids)
        slots = ints(self.kv.slots(0, rows, positions))
        self._token_ids = with_rows(self._token_ids, slots, input_ids)
        hidden = self.model.forward(input_ids, ints(positions), attention)
        prompt_words = None
        if plan.prompts is not None:
            prompt_words = score_prompts(plan.prompts, hidden, self.model.logits)
        self._hold(plan, hidden, positions)
        logits, tokens = plan.logits, ints(plan.logits.tokens)
        sampled = self._sampler.sample(
            logits,
            LogitsRows(logits.rows, positions[logits.tokens] + 1),
            lambda part: self.model.logits(hidden[tokens[part]]),
        )
        self._stash(logits.rows, sampled.tokens, stamp_of(plan.iteration))
        self.kv.commit(attention)
        return Graph(*sampled.pack(prompt_words), logits, self._state(attention))

    def sample(self, sample: Sample, row_params: RowParams, *, slice_len: int) -> Graph:
        """Samples held rows, which are then held no more."""
        rows = array_i32(sample.rows)
        held = self._held.take(sample.iteration, rows)
        indices = held.indices(rows)
        ones = np.ones_like(rows)
        plan = plan_logits(
            rows,
            np.cumsum(ones, dtype=np.int32),
            ones,
            row_params,
            max_len=int(held.lens.max()),
            vocab_size=self.model.vocab_size,
            slice_len=slice_len,
        )
        mask = ints(array_i32(sample.masks).reshape(len(rows), -1))
        logits = held.logits[ints(indices)]
        own = LogitsRows(rows, held.lens[indices], mask)
        sampled = self._sampler.sample(plan, own, lambda part: logits[part])
        self._stash(rows, sampled.tokens, stamp_of(held.iteration))
        return Graph(*sampled.pack(), plan, (self._last_tokens, *self._held_logits()))

    def forget_held(self) -> None:
        self._held.clear()

    def _resolved(self, input_ids: ArrayI32) -> mx.array:
        """Replaces -row by the row's last token."""
        ids = ints(input_ids)
        if (input_ids >= 0).all():
            return ids
        return mx.where(ids < 0, self._last_tokens[ints((-input_ids).clip(min=0))], ids)

    def _hold(self, plan: StepPlan, hidden: mx.array, positions: ArrayI32) -> None:
        if not len(plan.held_rows):
            return
        logits = self.model.logits(hidden[ints(plan.held_tokens)])
        lens = positions[plan.held_tokens] + 1
        self._held.keep(_Held(plan.iteration, plan.held_rows, lens, logits))

    def _stash(self, rows: ArrayI32, tokens: mx.array, stamp: int) -> None:
        if len(rows):
            self._last_tokens = with_rows(self._last_tokens, ints(rows), tokens)
            self._stamps[rows] = stamp

    def _history(self, rows: ArrayI32, positions: Table) -> mx.array:
        """The token ids of rows at positions."""
        return self._token_ids[ints(self.kv.slots(0, rows, positions))]

    def _state(self, attention: StepAttention) -> tuple[mx.array, ...]:
        logs = (log for pair in attention.log.values() for log in pair)
        return self._last_tokens, self._token_ids, *logs, *self._held_logits()

    def _held_logits(self) -> tuple[mx.array, ...]:
        return tuple(held.logits for held in self._held.steps())
