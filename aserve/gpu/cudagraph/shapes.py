"""`StepShape`: the shapes of steps that can be captured as graphs, and the padding plans with which
they are captured. A step without a shape runs eagerly.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from aserve.gpu.cudagraph.warmup import padding_batch
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import StepPlan, plan_step
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.step import PageWrites, VerifyPlan

# Kinds of sampling. Each graph can also run the steps of the kinds before its own.
GREEDY, NOISE, FILTER = "greedy", "noise", "filter"
FEW = (1, 2, 4)
STRIDE = 8


@dataclass(frozen=True, slots=True)
class StepShape:
    """Steps whose rows have `width` tokens each: the last token and width - 1 drafts. All rows are
    sampled, with at most what `sampling` names. No row is new, and each layer group writes no more
    page-table entries than `width` tokens of each row may need. With `skips_drafter` the graph has
    nothing of the drafter (ScheduleBatch).
    """

    num_rows: int
    width: int
    sampling: str
    skips_drafter: bool = False

    def is_at_least(self, other: StepShape) -> bool:
        """Whether this shape differs from the other one at most by more rows."""
        return self.num_rows >= other.num_rows and self == dataclasses.replace(
            other, num_rows=self.num_rows
        )

    def max_page_writes(self, page_size: int) -> int:
        """Returns the most page-table entries of one layer group that a step writes."""
        return self.num_rows * -(-self.width // page_size)


def shape_of(plan: StepPlan, page_size: int) -> StepShape | None:
    """Returns the unpadded shape of a step, or None if it cannot be replayed."""
    num_rows = len(plan.rows)
    logits = plan.logits
    if not num_rows or len(logits.rows) != num_rows or plan.prompts is not None:
        return None
    width = int(plan.query_lens[0])
    if plan.batch.row_inits or not _has_room(plan, StepShape(num_rows, width, GREEDY), page_size):
        return None
    if width == 1 and plan.is_bound.any():
        return None  # its lengths are published, which a step of plain decoding does not do
    is_even = (plan.query_lens == width).all() and (plan.num_drafts == width - 1).all()
    if not is_even or not all(part.is_plain for part in logits.slices):
        return None
    sampling = GREEDY
    if any(part.needs_filter for part in logits.slices):
        sampling = FILTER
    elif any(part.needs_noise for part in logits.slices):
        sampling = NOISE
    return StepShape(num_rows, width, sampling, plan.batch.skips_drafter)


def _has_room(plan: StepPlan, shape: StepShape, page_size: int) -> bool:
    most = shape.max_page_writes(page_size)
    return all(len(array_i32(part.rows)) <= most for part in plan.batch.page_writes)


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Returns the row counts to capture: 1, 2, 4, multiples of 8, and `max_rows`. None for 0."""
    counts = {*FEW, *range(STRIDE, max_rows, STRIDE), max_rows}
    return tuple(sorted(count for count in counts if 0 < count <= max_rows))


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """Every shape that may be captured. Those with a width of `late_widths` are captured only when
    a step has one, and with no more rows than the mapping says. With `has_skips` there are steps of
    one token per row that skip the drafter."""

    counts: tuple[int, ...]  # of rows, ascending
    widths: tuple[int, ...]
    samplings: tuple[str, ...]
    late_widths: Mapping[int, int] = field(default_factory=dict)
    has_skips: bool = False

    def padded(self, shape: StepShape) -> StepShape | None:
        """Returns the smallest shape of the table with at least as many rows, or None."""
        counts = self._counts(shape.width)
        index = bisect.bisect_left(counts, shape.num_rows)
        if index == len(counts) or shape.sampling not in self.samplings:
            return None
        return dataclasses.replace(shape, num_rows=counts[index])

    def at_start(self) -> list[StepShape]:
        """PERF: captured in this order, smaller graphs reuse the memory of larger ones."""
        kinds = [(width, False) for width in self.widths]
        if self.has_skips:
            kinds.append((1, True))
        return [
            StepShape(count, width, sampling, skips_drafter)
            for count in reversed(self.counts)
            for width, skips_drafter in kinds
            for sampling in self.samplings
        ]

    def largest(self) -> list[StepShape]:
        """Returns the shapes with the most rows of each width."""
        return [
            StepShape(self._counts(width)[-1], width, sampling)
            for width in (*self.widths, *self.late_widths)
            for sampling in self.samplings
            if self._counts(width)
        ]

    def _counts(self, width: int) -> tuple[int, ...]:
        if width in self.widths:
            return self.counts
        most = self.late_widths.get(width, 0)
        return tuple(count for count in self.counts if count <= most)


def shape_table(
    mode: DecodeMode, *, most_rows: int, by_shape: bool, has_drafter: bool
) -> ShapeTable:
    """Returns the shapes of the steps that may be captured. `by_shape`: filters are drawn by
    operators whose shapes follow from the plan."""
    caps = mode.caps
    widths = sorted({1, *mode.graph_widths})
    # Narrower windows: when the load, or the end of the outputs, leaves less to draft.
    late_widths = dict.fromkeys(set(range(1, widths[-1])) - {*widths}, most_rows)
    if caps.max_predicted and not has_drafter:
        # NOTE: with a drafter, windows of predictions run eagerly. It may take rows that are wider
        # than its own windows for prompts (front_rows.py).
        late_widths[caps.max_predicted + 1] = FEW[-1]
    return ShapeTable(
        counts=row_counts(most_rows),
        widths=tuple(widths),
        samplings=(GREEDY, NOISE, FILTER) if by_shape else (GREEDY, NOISE),
        late_widths=late_widths,
        has_skips=caps.max_tokens_per_step > caps.root_len and not caps.whole_windows,
    )


def padded_plan(plan: StepPlan, shape: StepShape, page_size: int) -> StepPlan:
    """Returns the plan with the shape's number of rows and page writes."""
    num_writes = shape.max_page_writes(page_size)
    writes = tuple(_padded(part, num_writes) for part in plan.batch.page_writes)
    batch = msgspec.structs.replace(plan.batch, page_writes=writes)
    return dataclasses.replace(plan.padded(shape.num_rows), batch=batch)


def _padded(writes: PageWrites, num: int) -> PageWrites:
    """Padding writes page 0 to column 0 of row 0, where it already is."""
    size = num * np.dtype(np.int32).itemsize
    return PageWrites(
        *(part.ljust(size, b"\0") for part in (writes.rows, writes.columns, writes.pages))
    )


def padding_plan(shape: StepShape, spec: EngineSpec, *, slice_len: int) -> StepPlan:
    """Returns a step of padding rows, whose host values are the largest that this shape allows."""
    drafts = pack_i32([shape.width - 1] * shape.num_rows)
    batch = padding_batch(shape.width, num_groups=len(spec.groups), num_rows=shape.num_rows)
    if shape.width > 1:
        verify = VerifyPlan(drafts, spec.decode.tree)
        batch = msgspec.structs.replace(batch, verify=verify)
    batch = msgspec.structs.replace(batch, skips_drafter=shape.skips_drafter)
    plan = plan_step(batch, RowParams(0), vocab_size=spec.vocab_size, slice_len=slice_len)
    slices = (
        dataclasses.replace(
            part,
            max_len=spec.max_model_len,
            needs_noise=shape.sampling != GREEDY,
            needs_filter=shape.sampling == FILTER,
            max_top_k=spec.vocab_size if shape.sampling == FILTER else 0,
        )
        for part in plan.logits.slices
    )
    return dataclasses.replace(
        padded_plan(plan, shape, spec.page_size),
        len_bounds=np.full(shape.num_rows, spec.max_model_len, np.int32),
        is_exact=False,
        logits=dataclasses.replace(plan.logits, slices=tuple(slices)),
    )
