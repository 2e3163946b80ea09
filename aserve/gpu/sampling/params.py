"""The sampling parameters of every row, as tables on the device.

They are written once per request, on the executor's stream, at the start of the step that brings
the row's `RowInit`. The host's copy of the parameters is `plan.RowParams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.sampling.namespaces import NamespaceShares
from aserve.gpu.sampling.predicted_texts import PredictedTexts
from aserve.gpu.sampling.tree_paths import TreePaths
from aserve.gpu.transfer.staging import ArrayF64, ArrayI64
from aserve.messages.step import RowInit
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS

UINT64_MASK = (1 << 64) - 1


class RowTables:
    """`int_table` int64 [max_rows + 1, 6] and `float_table` float64 [max_rows + 1, 6]. Row 0, the
    padding row, is greedy."""

    __slots__ = ("float_table", "int_table", "shares", "texts")

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self.int_table = torch.zeros(
            (max_rows + 1, len(INT_COLUMNS)), dtype=torch.int64, device=device
        )
        self.float_table = torch.zeros(
            (max_rows + 1, len(FLOAT_COLUMNS)), dtype=torch.float64, device=device
        )
        self.shares = NamespaceShares()
        self.texts = PredictedTexts(max_rows=max_rows, device=device)

    def write(self, rows: Tensor, *, ints: Tensor, floats: Tensor) -> None:
        """rows int64 [n], ints [n * 6], floats [n * 6]."""
        self.int_table.index_copy_(0, rows, ints.view(-1, len(INT_COLUMNS)))
        self.float_table.index_copy_(0, rows, floats.view(-1, len(FLOAT_COLUMNS)))

    def at(self, rows: Tensor, dtype: torch.dtype) -> RowColumns:
        """Returns the parameters of `rows`, int64 [n], which may repeat."""
        return RowColumns(
            self.int_table.index_select(0, rows), self.float_table.index_select(0, rows).to(dtype)
        )


class RowColumns:
    """The parameters of n logits rows; each column is a tensor [n]."""

    __slots__ = ("_floats", "_ints")

    def __init__(self, ints: Tensor, floats: Tensor) -> None:
        self._ints = ints
        self._floats = floats

    def ints(self, name: str) -> Tensor:
        return self._ints[:, INT_COLUMNS.index(name)]

    def floats(self, name: str) -> Tensor:
        return self._floats[:, FLOAT_COLUMNS.index(name)]


def init_columns(inits: Sequence[RowInit], shares: NamespaceShares) -> tuple[ArrayI64, ArrayF64]:
    """Returns the host arrays for `RowTables.write`. Seeds are taken modulo 2^64."""
    ints = [
        (
            *(_as_int64(init.seed), init.top_k, init.prompt_len, init.lora_slot),
            *shares.columns(init.namespace),
        )
        for init in inits
    ]
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
    """The rows that n logits rows belong to. A row has several logits rows when it verifies
    drafts."""

    rows: Tensor  # int64 [n]
    lens: Tensor  # int64 [n], tokens before the one to sample
    mask: Tensor | None = None  # int32 [n, ceil(vocab / 32)], one bit per allowed token
    paths: TreePaths | None = None

    def at(self, part: slice) -> LogitsRows:
        mask = None if self.mask is None else self.mask[part]
        paths = None if self.paths is None else self.paths.at(part)
        return LogitsRows(self.rows[part], self.lens[part], mask, paths)
