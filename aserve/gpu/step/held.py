"""Held rows: a step has computed their logits, and samples them when their grammar masks are there.

A Sample is planned as a small step of its own, whose tokens are the windows of its rows, and whose
forward has run already.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import StepPlan, plan_logits
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Layout
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.base import ArrayI32
from aserve.messages.results import RowDrafts


@dataclass(frozen=True, slots=True)
class HeldStep:
    """The held rows of one step, and the tokens of their windows, row by row."""

    step: DeviceStep
    places: Tensor  # int64 [held tokens], indices into the step's tokens
    logits: Tensor  # [held tokens, vocab]
    features: tuple[Tensor, ...]  # [held tokens, hidden] each, for drafters

    def plan_sample(
        self, rows: ArrayI32, row_params: RowParams, *, vocab_size: int, slice_len: int
    ) -> StepPlan:
        """Returns the plan of a Sample of these held rows."""
        plan = self.step.plan
        own = self._indices(rows)
        of_step = _places(rows, plan.rows)
        windows, len_bounds = plan.held_windows[own], plan.len_bounds[of_step]
        ends = np.cumsum(windows, dtype=np.int32)
        order = np.arange(len(rows), dtype=np.int32)
        nothing = np.empty(0, np.int32)
        token_to_row = np.repeat(order, windows)
        return dataclasses.replace(
            plan,
            rows=rows,
            query_lens=windows,
            kv_lens=len_bounds - windows,
            is_bound=np.ones_like(rows),
            len_bounds=len_bounds,
            is_exact=False,
            expects=np.zeros_like(rows),
            num_drafts=plan.num_drafts[of_step],
            token_to_row=token_to_row,
            offsets=np.arange(ends[-1], dtype=np.int32) - (ends - windows)[token_to_row],
            input_ids=np.zeros(ends[-1], np.int32),
            next_ids=-rows,
            held_rows=nothing,
            held_windows=nothing,
            held_tokens=nothing,
            logits=plan_logits(
                rows,
                ends,
                windows,
                row_params,
                max_len=int(len_bounds.max()),
                vocab_size=vocab_size,
                slice_len=slice_len,
            ),
            prompts=None,
        )

    def kept(self, rows: ArrayI32) -> ArrayI32:
        """Returns the indices of the rows' tokens among the held tokens."""
        windows = self.step.plan.held_windows
        starts = np.cumsum(windows) - windows
        parts = [np.arange(starts[i], starts[i] + windows[i]) for i in self._indices(rows)]
        return np.concatenate(parts).astype(np.int32)

    def _indices(self, rows: ArrayI32) -> list[int]:
        return _places(rows, self.step.plan.held_rows)


def _places(rows: ArrayI32, among: ArrayI32) -> list[int]:
    """Returns the index of each row."""
    return [int(np.flatnonzero(among == row)[0]) for row in rows]


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A Sample message on the device."""

    plan: StepPlan
    arrays: DeviceArrays
    origin: HeldStep  # the step that holds the rows

    @property
    def iteration(self) -> Tensor:
        """int64 [1], of the step whose logits were held."""
        return self.arrays.ints("iteration")

    @property
    def rows(self) -> Tensor:
        """int64 [n]."""
        return self.arrays.ints("sample_rows")

    @property
    def kept(self) -> Tensor:
        """int64 [tokens of the windows], indices into the held tokens."""
        return self.arrays.ints("kept")

    @property
    def mask(self) -> Tensor:
        """int32 [tokens of the windows, mask words]."""
        return self.arrays.narrow_ints("mask").view(len(self.plan.input_ids), -1)


class HeldRows:
    """The steps of which rows are held, by iteration. Written on the executor's thread only."""

    __slots__ = ("_rows", "_steps")

    def __init__(self) -> None:
        self._steps: dict[int, HeldStep] = {}
        self._rows: dict[int, set[int]] = {}  # those that are not sampled yet, by iteration

    def keep(self, held: HeldStep) -> None:
        plan = held.step.plan
        self._steps[plan.iteration] = held
        self._rows[plan.iteration] = {int(row) for row in plan.held_rows}

    def take(self, iteration: int, rows: ArrayI32) -> HeldStep:
        """Returns the step that holds these rows, which are then held no more."""
        held, sampled = self._rows.get(iteration, set()), {int(row) for row in rows}
        if missing := sorted(sampled - held):
            raise BugError(f"step {iteration}: rows {missing} are sampled, but not held")
        step = self._steps[iteration]
        held -= sampled
        if not held:
            del self._steps[iteration], self._rows[iteration]
        return step

    def clear(self) -> None:
        self._steps.clear()
        self._rows.clear()


def read_drafts(words: ArrayI32, layout: Layout, plan: StepPlan) -> tuple[RowDrafts, ...]:
    """Returns the drafts of held rows, from the last section of a packed result."""
    if not layout.num_draft_words:
        return ()
    end = sum(layout.sizes)
    tables = words[end - layout.num_draft_words : end]
    tables = tables.reshape(-1, len(plan.held_rows), layout.max_drafts)
    found: list[RowDrafts] = []
    for index, (row, window) in enumerate(zip(plan.held_rows, plan.held_windows, strict=True)):
        parts = [table[index, : window - 1].tobytes() for table in tables]
        if window > 1:
            found.append(RowDrafts(int(row), *parts))
    return tuple(found)
