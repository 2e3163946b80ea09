"""Whose logits they are. It knows no step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
