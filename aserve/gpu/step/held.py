"""Held rows: a step has computed their logits, and samples them when their grammar masks are there.

A Sample is planned as a small step of its own, whose tokens are the windows of its rows, and whose
forward has run already.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import StepPlan, plan_logits
from aserve.gpu.step.resolve import DeviceStep
from aserve.gpu.step.results import Layout
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.messages.base import ArrayI32
from aserve.messages.results import RowDrafts


@dataclass(frozen=True, slots=True, eq=False)
class HeldStep:
    """The held rows of one step, and the tokens of their windows, row by row."""

    step: DeviceStep
    rows: ArrayI32
    windows: ArrayI32  # [rows], tokens of each
    indices: Tensor  # int64 [held tokens], indices into the step's tokens
    logits: Tensor  # [held tokens, vocab]
    features: tuple[Tensor, ...]  # [held tokens, hidden] each, for drafters

    @classmethod
    def of(
        cls, step: DeviceStep, indices: Tensor, logits: Tensor, features: tuple[Tensor, ...]
    ) -> HeldStep:
        """Keeps what a Sample reads of the step, and no hidden states of all its tokens."""
        batch = dataclasses.replace(step.batch, capture=None, features=None)
        step, plan = dataclasses.replace(step, batch=batch), step.plan
        return cls(step, plan.held_rows, plan.held_windows, indices, logits, features)

    @property
    def iteration(self) -> int:
        return self.step.plan.iteration

    def narrowed(self, rows: ArrayI32) -> HeldStep:
        spans, windows = self._spans(rows), self.windows[self._indices(rows)]

        def only(values: Tensor) -> Tensor:
            """NOTE: by slices, because indices would have to be copied from the host."""
            return torch.cat([values[start:end] for start, end in spans])

        features = tuple(only(values) for values in self.features)
        indices, logits = only(self.indices), only(self.logits)
        return HeldStep(self.step, rows, windows, indices, logits, features)

    def plan_sample(
        self, rows: ArrayI32, row_params: RowParams, *, vocab_size: int, slice_len: int
    ) -> StepPlan:
        """Returns the plan of a Sample of these held rows."""
        plan = self.step.plan
        own = self._indices(rows)
        of_step = _places(rows, plan.rows)
        windows, len_bounds = self.windows[own], plan.len_bounds[of_step]
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
        parts = [np.arange(start, end) for start, end in self._spans(rows)]
        return np.concatenate(parts).astype(np.int32)

    def _spans(self, rows: ArrayI32) -> list[tuple[int, int]]:
        """Returns where each row's tokens begin and end among the held tokens."""
        ends = np.cumsum(self.windows)
        return [(int(ends[i] - self.windows[i]), int(ends[i])) for i in self._indices(rows)]

    def _indices(self, rows: ArrayI32) -> list[int]:
        return _places(rows, self.rows)


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


class Held(Protocol):
    """The held rows of one step."""

    @property
    def iteration(self) -> int: ...

    @property
    def rows(self) -> ArrayI32: ...

    def narrowed(self, rows: ArrayI32) -> Self:
        """Returns a copy for these of its rows, which does not keep the others' logits."""


HeldT = TypeVar("HeldT", bound=Held)


class HeldRows(Generic[HeldT]):
    """The step that holds each row. Written on the executor's thread only.

    A row whose request ends or is retracted gets no Sample, and nobody says so. It stays until a
    step names it again, which may be late. So a step of which half of the rows are gone is copied
    without them: in all, fewer than two times as many rows' logits are kept as there are rows.
    """

    __slots__ = ("_by_row",)

    def __init__(self) -> None:
        self._by_row: dict[int, HeldT] = {}

    def keep(self, held: HeldT) -> None:
        self._by_row |= dict.fromkeys(map(int, held.rows), held)

    def steps(self) -> set[HeldT]:
        """Returns the steps of which rows are held. They are told apart by identity."""
        return set(self._by_row.values())

    def take(self, iteration: int, rows: ArrayI32) -> HeldT:
        """Returns the step that holds these rows, which are then held no more."""
        found = {row: self._by_row.get(row) for row in map(int, rows)}
        own = {held for held in found.values() if held is not None and held.iteration == iteration}
        if missing := [row for row, held in found.items() if held not in own]:
            raise BugError(f"step {iteration}: rows {missing} are sampled, but not held")
        self.forget(rows)
        return own.pop()

    def forget(self, rows: ArrayI32) -> None:
        """The executor calls it for the rows of each step, before the step holds any of them."""
        if not self._by_row:
            return  # mostly
        popped = [self._by_row.pop(row) for row in map(int, rows) if row in self._by_row]
        for held in set(popped):
            left = [row for row in map(int, held.rows) if self._by_row.get(row) is held]
            if left and 2 * len(left) <= len(held.rows):
                self.keep(held.narrowed(np.array(left, np.int32)))

    def clear(self) -> None:
        self._by_row.clear()


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
