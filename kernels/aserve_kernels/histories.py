"""The tokens of rows, as they lie in the token pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Histories:
    """The tokens of n rows. Each has `lens` tokens in the pool, and then its root."""

    page_table: Tensor  # int64 [max_rows + 1, pages]
    token_pool: Tensor  # int32 [slots]
    page_size: int
    rows: Tensor  # int64 [n]
    lens: Tensor  # int64 [n]
    roots: Tensor  # int64 [n]
    max_len: int  # an upper bound of lens + 1


def last_tokens_ref(histories: Histories, size: int) -> Tensor:
    """Returns the last `size` tokens of each row, its root being the last, int64 [n, size]; -1
    before its first."""
    page_size, table = histories.page_size, histories.page_table
    places = histories.lens[:, None] - torch.arange(size - 1, -1, -1, device=table.device)
    known = places.clamp(min=0)
    pages = table[histories.rows[:, None], known // page_size]
    tokens = histories.token_pool[pages * page_size + known % page_size].to(torch.int64)
    tokens[:, -1] = histories.roots
    return torch.where(places >= 0, tokens, -1)
