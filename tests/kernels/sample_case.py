"""Logits and sampling parameters for the tests of the sampling kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS

MAX_ROWS = 40


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def make_tables(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """The indices of the rows, scattered over the parameter tables, and both tables."""
    generator = torch.Generator().manual_seed(3)
    low, high = -(1 << 63), (1 << 63) - 1
    ints = torch.randint(low, high, (MAX_ROWS, len(INT_COLUMNS) + 1), generator=generator)
    floats = torch.full((MAX_ROWS, len(FLOAT_COLUMNS)), torch.nan, dtype=torch.float64)
    indices = torch.randperm(MAX_ROWS, generator=generator)[: len(rows)]
    for index, row in zip(indices, rows, strict=True):
        for name, value in dataclasses.asdict(row).items():
            if name in INT_COLUMNS:
                ints[index, INT_COLUMNS.index(name)] = value
            else:
                floats[index, FLOAT_COLUMNS.index(name)] = value
    return indices, ints, floats


def draw_logits(num: int, vocab_size: int, *, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(num * vocab_size)
    return spread * torch.randn((num, vocab_size + 3), generator=generator)[:, :vocab_size]
