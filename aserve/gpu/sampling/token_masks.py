"""Masks tokens that must not be sampled: those that a grammar forbids, those outside of
allowed_token_ids, and those that would complete a bad word.

A bad word is a sequence of ids. Its last id is banned where the row's output ends with the ids
before it. The output is read from the token pool, so no state can lag behind an overlapped step.
`RowBans` is made once per request, and a step joins those of its rows in a `BanPlan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.sampling.tree_paths import TreePaths
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.base import ArrayI32
from aserve.messages.step import RowInit


class RowBans:
    """The allowed ids and bad words of one request, as int32 arrays."""

    __slots__ = ("allowed", "backs", "earlier", "lasts", "word_of")

    def __init__(self, init: RowInit) -> None:
        earlier = [
            (number, back, token_id)
            for number, word in enumerate(init.bad_word_ids)
            for back, token_id in enumerate(reversed(word[:-1]), 1)
        ]
        self.allowed = np.array(init.allowed_ids, np.int32)  # [allowed]
        self.lasts = np.array([word[-1] for word in init.bad_word_ids], np.int32)  # [words]
        # The ids before the last ones of all words: word, distance from the word's last id, and id.
        self.word_of, self.backs, self.earlier = np.array(earlier, np.int32).reshape(-1, 3).T


@dataclass(frozen=True, slots=True)
class BanPlan:
    """The bans of a step's logits rows, as int32 arrays."""

    rows: ArrayI32  # [rows], indices of logits rows with any ban
    restricted: ArrayI32  # [restricted], indices of logits rows with allowed ids
    allowing: ArrayI32  # [allowed], index into `restricted` of each allowed id
    allowed: ArrayI32  # [allowed], ids
    indices: ArrayI32  # [words], index of the logits row of each bad word
    lasts: ArrayI32  # [words], last id of each bad word
    word_of: ArrayI32  # [earlier], index into the words
    backs: ArrayI32  # [earlier], distance from the token to sample: 1 for the one right before it
    earlier: ArrayI32  # [earlier], ids

    def stage(self, arrays: HostArrays, prefix: str) -> None:
        for field in dataclasses.fields(self):
            arrays.add(f"{prefix}.{field.name}", getattr(self, field.name))


def plan_bans(indices: ArrayI32, bans: Sequence[RowBans]) -> BanPlan:
    """Joins the bans of several requests; indices int32 [n >= 1] are their logits rows."""
    num_allowed = np.array([len(each.allowed) for each in bans])
    num_words = np.array([len(each.lasts) for each in bans])
    starts = (np.cumsum(num_words) - num_words).astype(np.int32)
    restricted = np.flatnonzero(num_allowed).astype(np.int32)
    order = np.arange(len(restricted), dtype=np.int32)
    return BanPlan(
        rows=indices,
        restricted=indices[restricted],
        allowing=np.repeat(order, num_allowed[restricted]),
        allowed=np.concatenate([each.allowed for each in bans]),
        indices=np.repeat(indices, num_words),
        lasts=np.concatenate([each.lasts for each in bans]),
        word_of=np.concatenate(
            [each.word_of + start for each, start in zip(bans, starts, strict=True)]
        ),
        backs=np.concatenate([each.backs for each in bans]),
        earlier=np.concatenate([each.earlier for each in bans]),
    )


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tokens that the rows of n logits rows have put out so far."""

    rows: Tensor  # int64 [n]
    lens: Tensor  # int64 [n], tokens before the one to sample
    prompt_lens: Tensor  # int64 [n]
    pools: KvPools
    paths: TreePaths | None = None

    def ended_in(self, indices: Tensor, *, backs: Tensor, token_ids: Tensor) -> Tensor:
        """int64 [m] each -> bool [m]: whether the output of logits row `indices` has `token_ids` at
        the distance `backs` from its end."""
        positions = self.lens.index_select(0, indices) - backs
        rows = self.rows.index_select(0, indices)
        slots = self.pools.slots(0, rows, positions.clamp(min=0))
        is_output = positions >= self.prompt_lens.index_select(0, indices)
        found = self.pools.token_pool.index_select(0, slots).to(torch.int64)
        if self.paths is not None:
            found = self.paths.at_positions(indices, positions, found)
        return is_output & (found == token_ids)


def ban(logits: Tensor, outputs: Outputs, ints: Callable[[str], Tensor]) -> None:
    """Bans tokens in logits [n, vocab], in place. `ints` gives the plan's arrays on the device, as
    int64. A row's bans are ignored where they would leave it no token that its grammar allows."""
    rows = ints("rows")
    unbanned = logits.index_select(0, rows)
    restricted = ints("restricted")
    if len(restricted):
        own = logits.index_select(0, restricted)
        is_allowed = torch.zeros_like(own, dtype=torch.bool)
        is_allowed[ints("allowing"), ints("allowed")] = True
        logits.index_copy_(0, restricted, own.masked_fill_(~is_allowed, -torch.inf))
    indices, word_of = ints("indices"), ints("word_of")
    was_emitted = outputs.ended_in(
        indices.index_select(0, word_of), backs=ints("backs"), token_ids=ints("earlier")
    )
    misses = torch.zeros_like(indices).index_add_(0, word_of, (~was_emitted).to(torch.int64))
    values = torch.zeros_like(misses, dtype=logits.dtype).masked_fill_(misses == 0, -torch.inf)
    logits.index_put_((indices, ints("lasts")), values, accumulate=True)
    banned = logits.index_select(0, rows)
    is_left = banned.amax(dim=1, keepdim=True) > -torch.inf
    logits.index_copy_(0, rows, torch.where(is_left, banned, unbanned))


def allow(logits: Tensor, mask: Tensor) -> None:
    """Masks logits [n, vocab] in place. mask int32 [n, ceil(vocab / 32)] has one bit per token,
    which is set for allowed tokens."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    words = mask.index_select(1, token_ids // 32)
    logits.masked_fill_(((words >> (token_ids % 32)) & 1) == 0, -torch.inf)
