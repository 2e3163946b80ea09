"""The kernels of shared_table.py for the CPU."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit, types
from torch import Tensor

from aserve_kernels.cpu.host_rows import Int64s
from aserve_kernels.cpu.precompile import cached_njit, compile_ahead
from aserve_kernels.cpu.suffix_match import Int32s, history_arrays, last_tokens
from aserve_kernels.shared_table import (
    CONTEXT_LENS,
    FACTOR,
    MAX_CONTEXT,
    PLACE_BITS,
    TOKEN_BITS,
    TableRows,
)

Bools: TypeAlias = npt.NDArray[np.bool_]

IS_LENGTH = np.isin(np.arange(MAX_CONTEXT + 1), CONTEXT_LENS)  # of an n-gram


def continue_shared(rows: TableRows, drafts: Tensor, match_lens: Tensor) -> Tensor:
    """Does what `continue_shared_ref` does."""
    drafts = drafts.contiguous().clone()
    _continue_shared(*_arrays(rows), match_lens.contiguous().numpy(), drafts.numpy())
    return drafts


def remember(rows: TableRows, counts: Tensor, most: int) -> None:
    """Does what `remember_ref` does."""
    _remember(*_arrays(rows), counts.clamp(max=most).contiguous().numpy())


def compile_shared_table() -> None:
    longs, table = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
    words = types.Array(types.int32, 1, "C")
    rows = (
        types.Array(types.bool_, 1, "C"),
        table,
        longs,
        longs,
        table,
        words,
        types.int64,
        longs,
        longs,
        longs,
    )
    compile_ahead(_continue_shared, *rows, longs, table)
    compile_ahead(_remember, *rows, longs)


def _arrays(
    rows: TableRows,
) -> tuple[Bools, Int64s, Int64s, Int64s, Int64s, Int32s, int, Int64s, Int64s, Int64s]:
    """WHY the lengths are arguments: a kernel that is kept on disk would keep them, too."""
    keys, shares = rows.keys.contiguous().numpy(), rows.shares.contiguous().numpy()
    return IS_LENGTH, rows.entries.numpy(), keys, shares, *history_arrays(rows.histories)


@cached_njit(nogil=True)
def _continue_shared(
    is_length: Bools, entries: Int64s, keys: Int64s, shares: Int64s,
    page_table: Int64s, pool: Int32s, page_size: int, rows: Int64s, lens: Int64s, roots: Int64s,
    match_lens: Int64s, drafts: Int64s,
) -> None:  # fmt: skip
    for row in range(len(rows)):
        num, share = lens[row], entries[shares[row]]
        size, num_drafts = min(num + 1, len(is_length) - 1), drafts.shape[1]
        known = last_tokens(page_table[rows[row]], pool, page_size, num, size, roots[row])
        tokens = np.empty(size + num_drafts, np.int64)
        tokens[:size] = known
        for place in range(num_drafts):
            end = size + place
            token, length = _next(is_length, share, keys[row], tokens[:end])
            if place == 0 and length <= match_lens[row]:
                break
            tokens[end] = drafts[row, place] = token


@cached_njit(nogil=True)
def _remember(
    is_length: Bools, entries: Int64s, keys: Int64s, shares: Int64s,
    page_table: Int64s, pool: Int32s, page_size: int, rows: Int64s, lens: Int64s, roots: Int64s,
    counts: Int64s,
) -> None:  # fmt: skip
    for row in range(len(rows)):
        if not shares[row]:
            continue
        num, share = lens[row], entries[shares[row]]
        size = min(num + 1, len(is_length) - 1 + counts[row])
        tokens = last_tokens(page_table[rows[row]], pool, page_size, num, size, roots[row])
        for end in range(max(size - counts[row], 1), size):
            hashed = keys[row]
            for back in range(1, min(end + 1, len(is_length))):
                hashed = _hash(hashed, tokens[end - back])
                if is_length[back]:
                    share[_place(hashed, share)] = (hashed & ~TOKEN_BITS) | tokens[end]


@njit(nogil=True)
def _next(is_length: Bools, share: Int64s, key: int, tokens: Int64s) -> tuple[int, int]:
    """Returns the token after `tokens`, and the length of its n-gram."""
    token, length, hashed = tokens[-1], 0, key
    for back in range(1, min(len(tokens) + 1, len(is_length))):
        hashed = _hash(hashed, tokens[len(tokens) - back])
        if is_length[back]:
            entry = share[_place(hashed, share)]
            if entry != 0 and (entry ^ hashed) & ~TOKEN_BITS == 0:
                token, length = entry & TOKEN_BITS, back
    return token, length


@njit(inline="always")
def _hash(hashed: int, token: int) -> int:
    hashed = (hashed ^ (token + 1)) * FACTOR
    return hashed ^ (hashed >> 29)


@njit(inline="always")
def _place(hashed: int, share: Int64s) -> int:
    return (hashed & PLACE_BITS) % len(share)
