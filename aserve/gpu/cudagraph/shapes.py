"""`StepShape`: the shapes of steps that can be captured as graphs, and the padding plans with which
they are captured. A step without a shape runs eagerly.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np

from aserve.gpu.cudagraph.warmup import padding_batch
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import StepPlan, plan_step
from aserve.messages.base import pack_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.step import PageWrites, VerifyPlan

# Kinds of sampling. Each graph can also run the steps of the kinds before its own.
GREEDY, NOISE, FILTER = "greedy", "noise", "filter"
FEW = (1, 2, 4)
STRIDE = 8


@dataclass(frozen=True, slots=True)
class StepShape:
    """Steps whose rows have `width` tokens each: the last token and width - 1 drafts. All rows are
    sampled, with at most what `sampling` names. No row is new, and each layer group writes at most
    one page-table entry per row.
    """

    num_rows: int
    width: int
    sampling: str


def shape_of(plan: StepPlan) -> StepShape | None:
    """Returns the unpadded shape of a step, or None if it cannot be replayed."""
    num_rows = len(plan.rows)
    logits = plan.logits
    if not num_rows or len(logits.rows) != num_rows or plan.prompts is not None:
        return None
    batch = plan.batch
    if batch.row_inits or any(len(part.rows) > len(batch.rows) for part in batch.page_writes):
        return None
    width = int(plan.query_lens[0])
    if width == 1 and plan.is_bound.any():
        return None  # its lengths are published, which a step of plain decoding does not do
    is_even = (plan.query_lens == width).all() and (plan.num_drafts == width - 1).all()
    if not is_even or not all(part.is_plain for part in logits.slices):
        return None
    if any(part.needs_filter for part in logits.slices):
        return StepShape(num_rows, width, FILTER)
    has_noise = any(part.needs_noise for part in logits.slices)
    return StepShape(num_rows, width, NOISE if has_noise else GREEDY)


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Returns the row counts to capture: 1, 2, 4, multiples of 8, and `max_rows`. None for 0."""
    counts = {*FEW, *range(STRIDE, max_rows, STRIDE), max_rows}
    return tuple(sorted(count for count in counts if 0 < count <= max_rows))


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """Every shape that may be captured."""

    counts: tuple[int, ...]  # of rows, ascending
    widths: tuple[int, ...]
    samplings: tuple[str, ...]

    def padded(self, shape: StepShape) -> StepShape | None:
        """Returns the smallest shape of the table with at least as many rows, or None."""
        index = bisect.bisect_left(self.counts, shape.num_rows)
        is_known = shape.width in self.widths and shape.sampling in self.samplings
        if index == len(self.counts) or not is_known:
            return None
        return dataclasses.replace(shape, num_rows=self.counts[index])

    def largest_first(self) -> list[StepShape]:
        """PERF: captured in this order, smaller graphs reuse the memory of larger ones."""
        return [
            StepShape(count, width, sampling)
            for count in reversed(self.counts)
            for width in self.widths
            for sampling in self.samplings
        ]


def padded_plan(plan: StepPlan, shape: StepShape) -> StepPlan:
    """Returns the plan with the shape's number of rows, and as many page writes in each group."""
    writes = tuple(_padded(part, shape.num_rows) for part in plan.batch.page_writes)
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
        padded_plan(plan, shape),
        len_bounds=np.full(shape.num_rows, spec.max_model_len, np.int32),
        is_exact=False,
        logits=dataclasses.replace(plan.logits, slices=tuple(slices)),
    )
