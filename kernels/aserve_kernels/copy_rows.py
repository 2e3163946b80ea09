"""Copies rows between tensors on the device, or between the device and pinned memory of the host.

The device reads and writes pinned memory through its own address space, so that a list of rows
which only the device knows needs no copy of that list to the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 1024


def copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """target[target_rows[i]] = source[source_rows[i]] for all i with target_rows[i] >= 0.

    source and target [rows, ...], contiguous, of one dtype and row size; the lists are int64 [n] on
    the device. The targets differ.
    """
    if len(target_rows) == 0:
        return
    row_size = source[0].numel()
    block = min(triton.next_power_of_2(row_size), MAX_BLOCK)
    _copy_rows[(len(target_rows),)](
        source, source_rows, target, target_rows, ROW=row_size, BLOCK=block, num_warps=4
    )


def copy_rows_ref(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """The same in plain torch, for memory that torch's operators can read."""
    is_copied = target_rows >= 0
    target.index_copy_(0, target_rows[is_copied], source.index_select(0, source_rows[is_copied]))


@triton.jit
def _copy_rows(
    source: tl.tensor, source_rows: tl.tensor, target: tl.tensor, target_rows: tl.tensor,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    target_row = tl.load(target_rows + pair)
    if target_row < 0:
        return
    source_row = tl.load(source_rows + pair)
    for first in range(0, ROW, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_inside = places < ROW
        row = tl.load(source + source_row * ROW + places, mask=is_inside)
        tl.store(target + target_row * ROW + places, row, mask=is_inside)
