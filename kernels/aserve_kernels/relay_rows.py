"""Rows of the relay's tables: copied out by number, and written with the number of the step that
wrote them, in one launch.

It knows no field.
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
    """table [max_rows + 1, ...] and values [n, ...], both contiguous; rows int64 [n]; stamps int64
    [max_rows + 1]; iteration int64 [1]. Of equal rows any may win.
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
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    values = tl.load(table + row * width + columns, mask=is_in)
    tl.store(out + place * width + columns, values, mask=is_in)


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
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    given = tl.load(values + place * width + columns, mask=is_in)
    tl.store(table + row * width + columns, given, mask=is_in)
    if tl.program_id(1) == 0:
        tl.store(stamps + row, tl.load(iteration))
