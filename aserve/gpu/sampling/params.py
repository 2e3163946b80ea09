"""Sampling parameters of every row: tables on the device, and what the host must know of them.

It knows no step. Written once per tenant of a row, at the head of the step that brings its RowInit:
the host's part when the step is planned, the device's on its stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.transfer.staging import ArrayF64, ArrayI64
from aserve.messages.step import RowInit

INT_COLUMNS = ("seed", "top_k", "prompt_len")
FLOAT_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
UINT64_MASK = (1 << 64) - 1


class RowTables:
    """`int_table` int64 [max_rows + 1, 3], `float_table` float64 [max_rows + 1, 6]. Row 0 is
    greedy."""

    __slots__ = ("float_table", "int_table")

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self.int_table = torch.zeros(
            (max_rows + 1, len(INT_COLUMNS)), dtype=torch.int64, device=device
        )
        self.float_table = torch.zeros(
            (max_rows + 1, len(FLOAT_COLUMNS)), dtype=torch.float64, device=device
        )

    def write(self, rows: Tensor, *, ints: Tensor, floats: Tensor) -> None:
        """rows int64 [n], ints [n * 3], floats [n * 6]."""
        self.int_table.index_copy_(0, rows, ints.view(-1, len(INT_COLUMNS)))
        self.float_table.index_copy_(0, rows, floats.view(-1, len(FLOAT_COLUMNS)))

    def at(self, rows: Tensor, dtype: torch.dtype) -> RowColumns:
        """rows int64 [n]: a row may stand there more than once."""
        return RowColumns(
            self.int_table.index_select(0, rows), self.float_table.index_select(0, rows).to(dtype)
        )


class RowColumns:
    """Parameters of some logits rows, as columns [n]."""

    __slots__ = ("_floats", "_ints")

    def __init__(self, ints: Tensor, floats: Tensor) -> None:
        self._ints = ints
        self._floats = floats

    def ints(self, name: str) -> Tensor:
        return self._ints[:, INT_COLUMNS.index(name)]

    def floats(self, name: str) -> Tensor:
        return self._floats[:, FLOAT_COLUMNS.index(name)]


def init_columns(inits: Sequence[RowInit]) -> tuple[ArrayI64, ArrayF64]:
    """The values of `RowTables.write`, on the host. A seed of any size counts modulo 2^64."""
    ints = [(_as_int64(init.seed), init.top_k, init.prompt_len) for init in inits]
    floats = [
        (
            init.temperature,
            init.top_p,
            init.min_p,
            init.presence_penalty,
            init.frequency_penalty,
            init.repetition_penalty,
        )
        for init in inits
    ]
    return np.array(ints, np.int64), np.array(floats, np.float64)


def _as_int64(seed: int) -> int:
    wrapped = seed & UINT64_MASK
    return wrapped - (1 << 64) if wrapped >> 63 else wrapped


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Which row each logits row belongs to and how many tokens come before the one to sample:
    int64 [n]. `mask` int32 [n, ceil(vocab / 32)] allows tokens by bit."""

    rows: Tensor
    lens: Tensor
    mask: Tensor | None = None

    def at(self, part: slice) -> LogitsRows:
        mask = None if self.mask is None else self.mask[part]
        return LogitsRows(self.rows[part], self.lens[part], mask)
