"""A table of n-grams in which the rows of a namespace find each other's outputs: after these tokens
came that one.

It has a share for each of some namespaces. An n-gram's place in its share follows from the hash of
its namespace's key and of its tokens, from the last one back:

    h_0 = key;  h_i = mix((h_{i-1} ^ (1 + token_{-i})) * FACTOR_A);  mix(x) = x ^ (x >> 29)

An entry holds the upper bits of the hash, and the token that came after the n-gram in the lower
ones; 0 is no entry. A new n-gram takes the place of the one that was there, so the size is fixed
and old n-grams go. As the key is part of the hash, a share that passes to another namespace shows
it nothing of the one before.

These are the references in plain torch. Their shapes depend on bounds alone, so that a CUDA graph
can capture them; cpu/shared_table.py has the kernels of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from aserve_kernels.histories import Histories, last_tokens_ref
from aserve_kernels.splitmix64 import FACTOR_A, as_int64

# The lengths of the n-grams. The longest that is found says which token comes next.
CONTEXT_LENS = (2, 4, 8)
MAX_CONTEXT = CONTEXT_LENS[-1]
FACTOR = as_int64(FACTOR_A)
TOKEN_BITS = (1 << 22) - 1  # of an entry
PLACE_BITS = (1 << 62) - 1  # of a hash


@dataclass(frozen=True, slots=True)
class TableRows:
    """The table, and the rows that read it or add to it."""

    entries: Tensor  # int64 [shares, size]; share 0 is for padding
    keys: Tensor  # int64 [n], of the rows' namespaces
    shares: Tensor  # int64 [n]
    histories: Histories


def continue_shared_ref(rows: TableRows, drafts: Tensor, match_lens: Tensor) -> Tensor:
    """Returns `drafts`, int64 [n, num_drafts], where rows for which the table has an n-gram that is
    longer than match_lens, int64 [n], follow the table instead. Where it does not say what comes
    next, a token repeats.
    """
    suffixes = last_tokens_ref(rows.histories, MAX_CONTEXT)
    tokens, is_longer = [], torch.zeros_like(match_lens, dtype=torch.bool)
    for place in range(drafts.shape[1]):
        token, length = _next(rows, suffixes)
        if place == 0:
            is_longer = length > match_lens
        tokens.append(token)
        suffixes = torch.cat((suffixes[:, 1:], token[:, None]), dim=1)
    return torch.where(is_longer[:, None], torch.stack(tokens, dim=1), drafts)


def remember_ref(rows: TableRows, counts: Tensor, most: int) -> None:
    """Adds the n-grams before the last counts[i] tokens of each row, at most `most` of each."""
    suffixes = last_tokens_ref(rows.histories, MAX_CONTEXT + most)
    entries = rows.entries.view(-1)
    for back in range(most - 1, -1, -1):
        end = suffixes.shape[1] - 1 - back
        token = suffixes[:, end]
        before = suffixes[:, end - MAX_CONTEXT : end]
        for _, hashes, is_whole in _hashes(rows.keys, before):
            is_new = is_whole & (back < counts)
            places = torch.where(is_new, _places(rows, hashes), 0)
            entries.index_copy_(0, places, (hashes & ~TOKEN_BITS) | token)
    entries[:1].zero_()


def _next(rows: TableRows, suffixes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the token after each suffix, int64 [n, MAX_CONTEXT], and the length of its n-gram;
    the last token and 0 if there is none."""
    token, length = suffixes[:, -1], torch.zeros_like(suffixes[:, -1])
    for size, hashes, is_whole in _hashes(rows.keys, suffixes):
        entry = rows.entries.view(-1).index_select(0, _places(rows, hashes))
        is_found = is_whole & (entry != 0) & (((entry ^ hashes) & ~TOKEN_BITS) == 0)
        token = torch.where(is_found, entry & TOKEN_BITS, token)
        length = torch.where(is_found, size, length)
    return token, length


def _hashes(keys: Tensor, tokens: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """tokens int64 [n, MAX_CONTEXT], -1 before a row's first -> the hashes of the last tokens for
    each length, int64 [n], and whether there are so many."""
    found, hashes, is_whole = [], keys, torch.ones_like(keys, dtype=torch.bool)
    for back in range(1, MAX_CONTEXT + 1):
        token = tokens[:, -back]
        hashes = (hashes ^ (token + 1)) * FACTOR
        hashes = hashes ^ (hashes >> 29)
        is_whole = is_whole & (token >= 0)
        if back in CONTEXT_LENS:
            found.append((back, hashes, is_whole))
    return found


def _places(rows: TableRows, hashes: Tensor) -> Tensor:
    size = rows.entries.shape[1]
    return rows.shares * size + (hashes & PLACE_BITS) % size


# The signatures of the two references.
ContinueShared: TypeAlias = Callable[[TableRows, Tensor, Tensor], Tensor]
Remember: TypeAlias = Callable[[TableRows, Tensor, int], None]


@dataclass(frozen=True, slots=True)
class SharedTableOps:
    """The two operators as a device has them."""

    continue_shared: ContinueShared = continue_shared_ref
    remember: Remember = remember_ref


TORCH_SHARED_TABLE = SharedTableOps()
