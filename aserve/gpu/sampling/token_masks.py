"""Tokens that may not be sampled: what a grammar's mask leaves out, all but a row's allowed ones,
and what would end a bad word.

A bad word is a sequence of ids: its last one is banned where those before it were just emitted.
What was emitted is read from the token pool, so there is no state and no lag. The host's part is
made once per tenant of a row (`RowBans`) and joined for the rows of a step (`BanPlan`). It knows no
step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.gpu.kv.pools import KvPools
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.base import ArrayI32
from aserve.messages.step import RowInit


class RowBans:
    """`allowed` [allowed], `lasts` [words]; of the ids before the last ones, all words' together:
    whose they are, how far back and which [earlier]. All int32.
    """

    __slots__ = ("allowed", "backs", "earlier", "lasts", "token_to_row")

    def __init__(self, init: RowInit) -> None:
        earlier = [
            (owner, back, token_id)
            for owner, word in enumerate(init.bad_word_ids)
            for back, token_id in enumerate(reversed(word[:-1]), 1)
        ]
        self.allowed = np.array(init.allowed_ids, np.int32)
        self.lasts = np.array([word[-1] for word in init.bad_word_ids], np.int32)
        self.token_to_row, self.backs, self.earlier = np.array(earlier, np.int32).reshape(-1, 3).T


@dataclass(frozen=True, slots=True)
class BanPlan:
    """The bans of some logits rows, int32 each."""

    rows: ArrayI32  # [rows], the logits rows that have some
    restricted: ArrayI32  # [restricted], the logits rows with allowed ids
    allowing: ArrayI32  # [allowed], places in `restricted`
    allowed: ArrayI32  # [allowed]
    indices: ArrayI32  # [words], logits rows
    lasts: ArrayI32  # [words]
    token_to_row: ArrayI32  # [earlier], places among the words
    backs: ArrayI32  # [earlier], 1 for the token right before the one to sample
    earlier: ArrayI32  # [earlier]

    def stage(self, arrays: HostArrays, prefix: str) -> None:
        for field in dataclasses.fields(self):
            arrays.add(f"{prefix}.{field.name}", getattr(self, field.name))


def plan_bans(indices: ArrayI32, bans: Sequence[RowBans]) -> BanPlan:
    """places int32 [n >= 1]: the logits row of each."""
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
        token_to_row=np.concatenate(
            [each.token_to_row + start for each, start in zip(bans, starts, strict=True)]
        ),
        backs=np.concatenate([each.backs for each in bans]),
        earlier=np.concatenate([each.earlier for each in bans]),
    )


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the rows of some logits have emitted. int64 [n] each: the row, how many tokens come
    before the one to sample, and how many of these are its prompt.
    """

    rows: Tensor
    lens: Tensor
    prompt_lens: Tensor
    pools: KvPools

    def ended_in(self, indices: Tensor, *, backs: Tensor, token_ids: Tensor) -> Tensor:
        """int64 [m] each -> bool [m]: whether that token was emitted so far back."""
        positions = self.lens.index_select(0, indices) - backs
        rows = self.rows.index_select(0, indices)
        slots = self.pools.slots(0, rows, positions.clamp(min=0))
        is_output = positions >= self.prompt_lens.index_select(0, indices)
        return is_output & (self.pools.token_pool.index_select(0, slots) == token_ids)


def ban(logits: Tensor, outputs: Outputs, ints: Callable[[str], Tensor]) -> None:
    """logits [n, vocab], in place; `ints` gives the plan's arrays on the device, int64.

    Where its bans would leave a row nothing of what a grammar's mask has left, they do not count.
    """
    rows = ints("rows")
    unbanned = logits.index_select(0, rows)
    restricted = ints("restricted")
    if len(restricted):
        own = logits.index_select(0, restricted)
        is_allowed = torch.zeros_like(own, dtype=torch.bool)
        is_allowed[ints("allowing"), ints("allowed")] = True
        logits.index_copy_(0, restricted, own.masked_fill_(~is_allowed, -torch.inf))
    indices, token_to_row = ints("indices"), ints("token_to_row")
    was_emitted = outputs.ended_in(
        indices.index_select(0, token_to_row), backs=ints("backs"), token_ids=ints("earlier")
    )
    misses = torch.zeros_like(indices).index_add_(0, token_to_row, (~was_emitted).to(torch.int64))
    values = torch.zeros_like(misses, dtype=logits.dtype).masked_fill_(misses == 0, -torch.inf)
    logits.index_put_((indices, ints("lasts")), values, accumulate=True)
    banned = logits.index_select(0, rows)
    is_left = banned.amax(dim=1, keepdim=True) > -torch.inf
    logits.index_copy_(0, rows, torch.where(is_left, banned, unbanned))


def allow(logits: Tensor, mask: Tensor) -> None:
    """logits [n, vocab], in place; mask int32 [n, ceil(vocab / 32)] allows tokens by bit."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    words = mask.index_select(1, token_ids // 32)
    logits.masked_fill_(((words >> (token_ids % 32)) & 1) == 0, -torch.inf)
