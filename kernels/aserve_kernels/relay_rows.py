"""Gather and scatter of rows of the relay's tables, each in one kernel launch.

gather:   out[i] = table[rows[i]]
scatter:  table[rows[i]] = values[i];  stamps[rows[i]] = iteration
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """table [max_rows + 1, ...] of any dtype, contiguous; rows int64 [n] -> [n, ...]."""
    out = table.new_empty((len(rows), *table.shape[1:]))
    width = math.prod(table.shape[1:])
    if out.numel():
        _gather[(len(rows), triton.cdiv(width, BLOCK))](table, rows, out, width, _block(width))
    return out


def gather_rows_ref(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows]


def scatter_rows(
    table: Tensor, rows: Tensor, values: Tensor, stamps: Tensor, iteration: Tensor
) -> None:
    """Writes `values` and stamps each written row with the iteration of the step that wrote it.

    table [max_rows + 1, ...] and values [n, ...], contiguous, of one dtype; rows int64 [n]; stamps
    int64 [max_rows + 1]; iteration int64 [1]. If a row occurs twice, either value may be kept.
    """
    width = math.prod(table.shape[1:])
    if len(rows):
        grid = (len(rows), triton.cdiv(width, BLOCK))
        _scatter[grid](table, rows, values, stamps, iteration, width, _block(width))


def scatter_rows_ref(
    table: Tensor, rows: Tensor, values: Tensor, stamps: Tensor, iteration: Tensor
) -> None:
    table[rows] = values
    stamps[rows] = iteration


def _block(width: int) -> int:
    block: int = triton.next_power_of_2(width)
    return min(BLOCK, block)


@triton.jit
def _gather(
    table: tl.tensor, rows: tl.tensor, out: tl.tensor, width: int, BLOCK: tl.constexpr
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = columns < width
    values = tl.load(table + row * width + columns, mask=in_bounds)
    tl.store(out + index * width + columns, values, mask=in_bounds)


@triton.jit
def _scatter(
    table: tl.tensor,
    rows: tl.tensor,
    values: tl.tensor,
    stamps: tl.tensor,
    iteration: tl.tensor,
    width: int,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = columns < width
    value = tl.load(values + index * width + columns, mask=in_bounds)
    tl.store(table + row * width + columns, value, mask=in_bounds)
    if tl.program_id(1) == 0:
        tl.store(stamps + row, tl.load(iteration))
